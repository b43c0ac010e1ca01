"""The orthogonality penalty as one object: attach, call, read its parts, remove."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor, nn

from wellposed import hooks
from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, RoleNotFoundError, listed, unknown_name
from wellposed.interrupts import all_or_nothing, run_all
from wellposed.model_checks import require_module
from wellposed.options import Size
from wellposed.penalize._affinities import AffinityCapture, affinity_parts
from wellposed.penalize._affinity_form import affinity_form
from wellposed.penalize._forms import Form, chosen_forms
from wellposed.penalize._logged import TermsLog
from wellposed.penalize._plan import planned
from wellposed.penalize._roles import AFFINITY, PENALISED_ROLES, RoleOptions
from wellposed.penalize._terms import (
    PENALTY,
    Part,
    Term,
    bound_state,
    distinct_terms,
    frozen_weights,
    weight_terms,
)
from wellposed.penalize._trainer import PenalisedLoss, Scale
from wellposed.penalize._weights import weight_parts
from wellposed.plan import Plan
from wellposed.removed_names import removed_keywords
from wellposed.roles import CallWatch, LiveParts, Roles, batch_advice, find_roles_for, heads_advice
from wellposed.zero_weights import check_whole, is_copied, is_in_parts

Strength = float | Callable[[int], float]
_UNSEEN = ("flash", "flex", "paged")  # kernels that call neither SDPA nor a softmax


class OrthogonalityPenalty:
    """Add ``strength * |W^T W - I|`` of weights and ``strength * |A^T A - I|_F^2`` of affinities.

    Weights are read in place and no model code is edited. Summed over layers:

    - ``affinity``: ``|A^T A - I|_F^2`` of every self-attention, always squared: mean over the batch
      of the sum over heads, before dropout, masked. Padded tokens are left out, of I too.
    - ``attention``: ``|P^T P - I|``, P = query, key, value and output stacked along outputs
      (``joint``), or summed (``separate``). Self-attention only, unless ``cross_attention``.
    - ``feedforward``: ``|M^T M - I|`` of in, gate (if any) and out.
    - ``query``, ``key``, ``value``, ``embedding`` (of tokens): ``|A A^T - I|``, A (out, in).

    A weight in two roles of one strength (or of query, key and value) counts once (``notes``).
    Warnings name such weights and frozen ones. Adapted layers (LoRA and kin) are penalised by the
    weight that they compute with, which trains the adapters; add these first.

    Status: a penalty; exact to rounding, unbiased if probes or ``every`` sample.
    Source: Zhang et al. (2021, sec. 2) for the first three strengths; McGrath (2024, eq. 1, 2) for
    the rest and ``qr``. `wellposed.presets` has their settings.

    Args:
        model: the module that will be called; with ``affinity`` it has hooks until `remove`.
        affinity: strength >= 0, or a function of the step.
        attention: as `affinity`.
        feedforward: as `affinity`.
        query: as `affinity`.
        key: as `affinity`.
        value: as `affinity`.
        embedding: as `affinity`.
        form: of ``| |``: ``"gram_squared"`` (squared Frobenius norm), ``"gram"`` (the norm),
            ``"qr"`` (``|Q - A|_F``) or that of the strength's ``"paper"`` (squares for attention
            and feedforward, norms for the rest); or a mapping from strength name to form. Of
            ``"affinity"`` ``"paper"`` (squares) or ``"jasmin"``, `softmax_norm_penalty`. Strengths fit
            their own form only.
        attention_mode: ``"joint"`` or ``"separate"``.
        estimator: ``"exact"``, or ``"probes"`` in O(N) memory.
        num_probes: number of random probes.
        every: k: non-zero at calls 0, k, 2k, ..., scaled by k; set ``step`` in a resumed run.
        qr_method: ``"householder"`` or ``"gram_schmidt"``.
        gram_dtype: dtype of the Gram products, for example ``torch.bfloat16``.
        cross_attention: include cross-attention weights.
        where: Patterns by role, for `wellposed.find_roles`.
        batch: Input for `wellposed.find_roles`.
        generator: source of the probes; the global one by default.
        log_to: as in `wellposed.Monitor`: tracker that gets the terms of one call in ``log_every``.
        log_every: calls (under `attach`: steps) from one logged call to the next, which reads them.
        dry_run: print the cost of a call, keep it as ``plan`` (`wellposed.plan.Plan`) and `remove`
            the penalty. Weights may be on the meta device.
        **roles: strengths of roles registered in `wellposed.penalize.PENALISED_ROLES`.

    Raises:
        ConfigError: a bad strength, keyword, form, mode or estimator; no model; quantised or (on a
            CPU) float16 weights; an attention implementation that cannot be watched.
        RoleNotFoundError: the model has no weight of a kind that is penalised.
        ShapeError: ``joint`` on weights of different input widths.

    Cost: two products a weight, on its smaller side; affinities keep query and key until backward.
    When not to use: for orthogonal weights (`constrain_`); affinities under tensor parallelism.

    >>> layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> penalty = OrthogonalityPenalty(layer, affinity=1e-2, attention=1e-2)
    >>> (layer(torch.randn(2, 5, 16)).square().mean() + penalty()).backward()
    >>> sorted(penalty.terms())
    ['affinity.encoder.0', 'attention.encoder.0']
    """

    @removed_keywords(patterns="where")
    @checked_arguments
    def __init__(
        self,
        model: nn.Module,
        *,
        affinity: Strength = 0.0,
        attention: Strength = 0.0,
        feedforward: Strength = 0.0,
        query: Strength = 0.0,
        key: Strength = 0.0,
        value: Strength = 0.0,
        embedding: Strength = 0.0,
        form: Form | Mapping[str, Form] = "paper",
        attention_mode: Literal["joint", "separate"] = "joint",
        estimator: Literal["exact", "probes"] = "exact",
        num_probes: Size = 32,
        every: Size = 1,
        qr_method: Literal["householder", "gram_schmidt"] = "householder",
        gram_dtype: torch.dtype | None = None,
        cross_attention: bool = False,
        where: Mapping[str, str | Sequence[str]] | None = None,
        batch: Any = None,
        generator: torch.Generator | None = None,
        log_to: Any = None,
        log_every: Size = 100,
        dry_run: bool = False,
        **roles: Strength,
    ) -> None:
        _check_roles(roles)
        require_module("OrthogonalityPenalty", model)
        strengths = {
            AFFINITY: affinity,
            "attention": attention,
            "feedforward": feedforward,
            "query": query,
            "key": key,
            "value": value,
            "embedding": embedding,
            **roles,
        }
        self._strengths = _active(strengths)
        on_weights = [name for name in PENALISED_ROLES if name in self._strengths]
        self.step = 0
        self.every = every
        self.removed = False
        self.notes: tuple[str, ...] = ()
        self._log = TermsLog(log_to, log_every)
        self.terms_step: int | None = None
        self._find = partial(find_roles_for, PENALTY, batch=batch, where=where)
        self._terms_of = partial(
            weight_terms,
            forms=chosen_forms(form, on_weights),
            options=RoleOptions(joint=attention_mode == "joint", cross_attention=cross_attention),
            qr_method=qr_method,
            gram_dtype=gram_dtype,
        )
        self._warned = False
        probes = {"num_probes": num_probes, "generator": generator}
        self._affinity_form = affinity_form(
            form,
            is_alone=not on_weights and AFFINITY in self._strengths,
            estimator=estimator,
            **probes,
        )
        self.roles: Roles
        self._all_terms: list[Term]
        self._live: LiveParts
        self._calls: CallWatch
        self._parts: list[Part] | None
        self._capture: AffinityCapture | None = None
        self._captures: list[AffinityCapture] = []
        hooks.end_with(self, partial(_remove_all, self._captures))
        self._attached: list[Any] = []
        self._bind(model, stacklevel=4)
        self.plan: Plan | None = None

        if dry_run:
            notes = ["affinity is not planned"] if AFFINITY in self._strengths else []
            self.plan = planned(model, self._terms, *notes).show()
            self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Copies are attached to no trainer."""
        return {**vars(self), "_attached": []}

    def __call__(self) -> Tensor:
        """Return the penalty as a scalar with gradient, and count one step.

        Raises:
            ConfigError: after `remove`; penalised layers changed (each is named, see `rebind`); a
                negative strength of a schedule; with gradients, a strength whose weights are all
                frozen. With ``affinity`` also: no forward pass before, its graph was freed,
                attention that was not seen, or no gradient.
        """
        strengths = self._advance()
        if strengths is None or not any(strengths.values()):  # a zero without gradient
            if strengths is not None:
                self._parts = []
                self._note_terms()
            weight = next(next(self.roles.weights()).view.owner.parameters())
            return torch.zeros((), device=weight.device)

        if torch.is_grad_enabled():
            self._check_trained()
        parts = list(weight_parts(self._terms, strengths))
        if self._capture is not None:
            calls = self._capture.take()
            strength = strengths[AFFINITY]
            parts += affinity_parts(calls, strength, self._affinity_form)

        self._parts = [(names, part.detach()) for names, part in parts]
        self._note_terms()
        device = parts[0][1].device  # layers may lie on several
        return torch.cat([part.to(device) for _, part in parts]).sum()

    def accumulate_(self) -> Tensor:
        """Add the gradient of the weight terms to ``.grad``, count one step, return the detached
        penalty.

        Status: exact, as ``penalty().backward()``. Call it once per optimizer step: after
        ``backward()`` of the loss, unscaling and, under DDP, averaging, before clipping.

        Raises:
            ConfigError: affinity terms, which need the graph, or as a call. Nothing has been added
                then.

        Cost: that of a call; gradients of one batch of weights at a time in memory.
        When not to use: inside a compiled step.

        >>> layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> penalty = OrthogonalityPenalty(layer, attention=1e-2)
        >>> penalty.accumulate_().item() > 0, layer.self_attn.in_proj_weight.grad is not None
        (True, True)
        """
        if self._capture is not None:
            raise ConfigError(
                "accumulate_() adds gradients without a graph, which affinities need: use penalty()"
                " and backward(), or a second OrthogonalityPenalty for the affinity alone"
            )

        weights = (view.parameter for term in self._terms for view in term.views)
        if any(map(is_copied, weights)):
            raise ConfigError(
                "accumulate_() adds to gradients that DeepSpeed ZeRO has taken already, so they would be"
                " lost: write engine.backward(loss + penalty())"
            )

        with torch.enable_grad():
            value = self()
        if value.requires_grad:
            value.backward()
        return value.detach()

    def terms(self) -> dict[str, float]:
        """Return the terms of the last call at which ``every`` was due; they add up to its value.

        ``terms_step`` is that call, counted from 1 (under `attach`, the step of the optimizer).

        Keys are ``strength.stack.layer``: ``"affinity.encoder.0"``, ``"feedforward.encoder.0.up"``.

        Raises:
            ConfigError: the penalty has not been called yet; a hook or a replaced ``forward`` makes
                a layer compute something else than when the penalty was made.
        """
        if self._parts is None:
            raise ConfigError("terms() shows the parts of the last call; call penalty() first")
        lines = self._calls.changes()
        if lines:
            raise ConfigError(
                f"these layers compute something else since the penalty was made:\n{listed(lines)}\n"
                "Remove what changes them, or run penalty.rebind(model) with the model that you train"
            )

        total = dict[str, float]()  # two layers may share a weight, or one may run twice
        for names, part in self._parts:
            for name, number in zip(names, part.tolist(), strict=True):
                total[name] = total.get(name, 0.0) + number
        return total

    @checked_arguments
    def attach(self, trainer: Any, *, scale: Scale = "step") -> None:
        """Add the penalty to any loss that a `transformers.Trainer` computes in training.

        Status: exact: a step's gradient is that of the trainer's own loss plus that of one penalty,
        the mean over micro-batches and processes, before clipping. A Trainer that accumulates N
        micro-batches counts losses that are means (all classifiers of transformers) N times: then a
        warning says so, and ``"task"`` counts the penalty as often. ``compute_loss`` is called
        unchanged. Evaluation and strength 0 add nothing. The penalty follows each new model of
        ``model_init`` and the step of a resumed run. A first penalty above ten times the loss is
        logged as a warning. `remove` restores ``compute_loss``.

        Args:
            trainer: a Trainer of transformers or a subclass, with the model of this penalty.
            scale: ``"step"``: one penalty a step. ``"task"``: the same ratio to the task's loss for
                any number of accumulated micro-batches.

        Raises:
            ConfigError: no such trainer, one with a penalty or another model, or ``affinity`` under
                `torch.nn.DataParallel`. In training, ``"task"`` with a ``compute_loss`` of a
                subclass that neither uses ``num_items_in_batch`` nor sets
                ``loss_is_scaled_for_ga``.

        Cost: one call of the penalty for each micro-batch.
        When not to use: a trainer whose ``training_step`` never calls its ``compute_loss``.

        >>> trainer = Trainer(model, arguments, train_dataset=rows)  # doctest: +SKIP
        >>> penalty.attach(trainer)  # doctest: +SKIP
        """
        self._check_not_removed()
        with all_or_nothing() as undo:
            attached = PenalisedLoss(self, trainer, scale)
            undo.later(attached.remove)
            self._attached.append(attached)

    def rebind(self, model: nn.Module) -> None:
        """Penalise the weights that ``model`` has now, at the same strengths and step.

        Use it after a change that a call refuses: layers cut off, modules replaced, adapters added
        or merged, another model. It raises and costs as the constructor.

        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3)
        >>> penalty = OrthogonalityPenalty(model, attention=1e-2)
        >>> model.layers = model.layers[:2]
        >>> penalty.rebind(model)
        >>> penalty().item() > 0, sorted(penalty.terms())
        (True, ['attention.encoder.0', 'attention.encoder.1'])
        """
        self._check_not_removed()
        require_module("rebind", model)
        self._bind(model, stacklevel=2)

    def remove(self) -> None:
        """Remove all hooks from the model and the penalty from trainers; idempotent."""
        self.removed = True
        self._parts = None
        removals = [part.remove for part in (*self._captures, *self._attached)]
        run_all(*removals, self._attached.clear)

    def _bind(self, model: nn.Module, stacklevel: int) -> None:
        """Penalise the weights of ``model``; after an error, those of before."""
        roles = self._find(model)
        terms = self._terms_of(model, roles)
        parts = {view.owner_path: view.owner for term in terms for view in term.views}
        with all_or_nothing() as undo:
            before = self._capture
            if AFFINITY in self._strengths:
                capture = _watched(model, roles, self._is_due)
                undo.later(capture.remove)
                undo.set(self, "_capture", capture)
                paths = {role.path for role in capture.attention.values()}
                parts |= {path: model.get_submodule(path) for path in paths}
            undo.set(self, "roles", roles)
            undo.set(self, "_all_terms", terms)
            undo.set(self, "_live", LiveParts(model, parts))
            read = (view for term in terms for view in term.views if not view.is_computed)
            undo.set(self, "_calls", CallWatch(model, read))
            undo.set(self, "_parts", None)
            undo.set(self, "terms_step", None)
            self._count(stacklevel + 2)
            self._captures[:] = [self._capture] if self._capture is not None else []
            if before is not None and before is not self._capture:
                before.remove()

    def _count(self, stacklevel: int) -> None:
        """Count shared weights once, with the adapters that are active."""
        terms, notes = distinct_terms(self._all_terms)
        state = bound_state(self._all_terms, terms)
        if notes and self.notes != tuple(notes):
            warnings.warn(
                "weights shared between roles are penalised once:\n" + listed(notes),
                stacklevel=stacklevel,
            )
        self._terms = terms
        self._state = state
        self.notes = tuple(notes)

    def _check_live(self) -> None:
        """Refuse a model whose penalised parts changed; count shared weights anew."""
        # ZeRO-3 takes all weights of a model, so the first tells; this is run in every step.
        if not torch.compiler.is_compiling() and is_in_parts(next(self._live.model.parameters())):
            check_whole("OrthogonalityPenalty", self._live.model)
        now = bound_state(self._all_terms, self._terms)
        lines = self._live.changes()
        if now == self._state and not lines:
            return

        views = (view for term in self._all_terms for view in term.views)
        for view, (before, *_), (after, *_) in zip(views, self._state[0], now[0], strict=True):
            if before != after and before and after:
                name = view.parameter_name
                lines.append(f"{name}: its shape was {tuple(before)} and is {tuple(after)}")

        if lines:
            raise ConfigError(
                "the model is no longer the one that the penalty was made for:\n"
                f"{listed(list(dict.fromkeys(lines)))}\nTo penalise what it has now, run"
                " penalty.rebind(model) with the model that you train"
            )
        self._count(stacklevel=5)

    def _check_not_removed(self) -> None:
        if self.removed:
            raise ConfigError("this penalty was removed from its model; make a new one")

    def _advance(self) -> dict[str, float] | None:
        """Count a step and return its strengths; None if ``every`` leaves it out."""
        self._check_not_removed()
        self._check_live()
        step = 0
        # A graph that reads the step is recompiled if the step changes.
        if self._reads_step() or not torch.compiler.is_compiling():
            step = self.step
            self.step = self.step + 1
        if step % self.every:
            return None
        pairs = self._strengths.items()
        return {name: _at(name, strength, step) * self.every for name, strength in pairs}

    def _reads_step(self) -> bool:
        return self.every > 1 or self._log.is_on or any(map(callable, self._strengths.values()))

    def _note_terms(self) -> None:
        """Keep the step of the terms, from 1, and log them; for a trainer, of its optimizer."""
        if self._reads_step() or not torch.compiler.is_compiling():
            self.terms_step = self._attached[-1].optimizer_step + 1 if self._attached else self.step
        if self._log.is_on and self.terms_step is not None:
            self._log.write(self, self.terms_step - 1)

    def _check_trained(self) -> None:
        frozen = frozen_weights(self._terms)
        if frozen and not self._warned:
            self._warned = True
            warnings.warn(
                "these weights are frozen, so their part of the penalty is a number without"
                " gradient:\n" + listed(frozen),
                stacklevel=3,
            )

    def _is_due(self) -> bool:
        return self.every == 1 or self.step % self.every == 0


def _remove_all(captures: Sequence[AffinityCapture]) -> None:
    run_all(*(capture.remove for capture in captures))


def _check_roles(names: Iterable[str]) -> None:
    """Raise `ConfigError` for keywords that are no registered role."""
    for name in names:
        if name not in PENALISED_ROLES:
            parameters = inspect.signature(OrthogonalityPenalty).parameters
            keywords = [key for key in parameters if key != "roles"]
            raise unknown_name(
                "keyword of OrthogonalityPenalty",
                name,
                dict.fromkeys([*keywords, *PENALISED_ROLES]),
            )


def _active(strengths: Mapping[str, Strength]) -> dict[str, Strength]:
    numbers = {name: strength for name, strength in strengths.items() if not callable(strength)}
    bad = [f"{name} = {number!r}" for name, number in numbers.items() if not _is_strength(number)]
    if bad:
        kinds = "finite numbers >= 0, or functions of the step"
        raise ConfigError(f"OrthogonalityPenalty: strengths are {kinds}:\n{listed(bad)}")
    active = {name: strength for name, strength in strengths.items() if strength}
    if not active:
        raise ConfigError(
            "OrthogonalityPenalty has no strength above zero; set one of " + ", ".join(strengths)
        )
    return active


def _at(name: str, strength: Strength, step: int) -> float:
    value = strength(step) if callable(strength) else strength
    if not _is_strength(value):
        problem = f"the schedule of {name} returned {value!r} at step {step}"
        raise ConfigError(f"{problem}; expected a finite number >= 0")
    return float(value)


def _is_strength(value: object) -> bool:
    return isinstance(value, SupportsFloat) and 0 <= float(value) < math.inf


def _watched(model: nn.Module, roles: Roles, is_due: MethodType) -> AffinityCapture:
    attention = [role for role in roles.attention if role.kind == "self"]
    if not attention:
        is_whole = any(weight.role == "query" for weight in roles.loose)
        by_heads = heads_advice(PENALTY, roles)
        choice = by_heads if is_whole else batch_advice(PENALTY, model, roles)
        raise RoleNotFoundError(
            "OrthogonalityPenalty: affinity: no self-attention module was found in"
            f" {type(model).__name__}; set affinity=0.\n{choice}\nRoles found:\n{roles}"
        )

    kernels = {
        path or type(module).__name__: str(getattr(module.config, "_attn_implementation", None))
        for path, module in model.named_modules()
        if hasattr(module, "config")
    }
    unseen = [f"{path}: {k}" for path, k in kernels.items() if any(word in k for word in _UNSEEN)]
    if unseen:
        raise ConfigError(
            "affinities cannot be seen inside these attention kernels; run"
            " model.set_attn_implementation('sdpa') first, or set affinity=0:\n" + listed(unseen)
        )

    return AffinityCapture(model, attention, hooks.WhileAlive(is_due))
