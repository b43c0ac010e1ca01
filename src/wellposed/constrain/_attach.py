"""`constrain_`: check everything first, project to the nearest weights of the set, put the hooks
on."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments, say_moves
from wellposed.constrain._handle import Constraint, ConstraintReport, handles_of
from wellposed.constrain._logits import attention_of, check_not_compiled, head_rows, held_logits
from wellposed.constrain._matrix import SETS, TOLERANCES, ConstrainedMatrix, MatrixSet, Orthogonal
from wellposed.constrain._plan import planned
from wellposed.constrain._select import LAYERS, Candidate, Where, select_weights, unwrap_model
from wellposed.constrain._start import start_weights
from wellposed.errors import ConfigError, ConvergenceError, ShapeError, listed, shortened
from wellposed.linalg import is_sharded, read
from wellposed.options import Positive, fits, rms_radius
from wellposed.roles import is_table, is_transposed

logger = logging.getLogger(__name__)

Set: TypeAlias = Literal["orthogonal", "spectral", "columns", "logits"] | str
"""One of these, or a name registered in `SETS`."""
_NO_STEPS = frozenset({"LBFGS", "SparseAdam"})


@checked_arguments
def constrain_(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    where: Where | None = None,
    *,
    roles: str | Sequence[str] | None = None,
    to: Set = "orthogonal",
    per: Literal["head"] | None = None,
    batch: Any = None,
    bound: Positive | str | None = None,
    gain: Positive | Literal["fit"] | None = None,
    embeddings: Literal["refuse", "fit"] = "refuse",
    batched: bool | None = None,
    dry_run: bool = False,
) -> Constraint:
    """Keep the chosen weights in a set through every ``optimizer.step()``.

    ``to="orthogonal"``: ``W^T W = gain^2 I`` (``W W^T`` for wide W). ``to="spectral"``: ``|W|_2 <=
    bound``, or with ``bound="rms:X"`` ``|W|_2 <= X sqrt(fan_out / fan_in)``, at which the root mean
    square of outputs is at most X times that of inputs (Yang, Simon and Bernstein 2023).
    ``to="columns"``: ``|W e_j| = bound`` for every column j of W in (out, in) orientation;
    the columns of an embedding are the vectors of its tokens. ``to="logits"``: QK-clip (Kimi Team
    2025, MuonClip): a head whose largest attention logit l of the passes since the last step was
    above ``b = bound / g^1.5`` has the rows of its query and key, and their biases, multiplied by
    ``sqrt(b / l)`` after the step; g is the largest growth of a logit above ``bound / 2`` in one
    step so far, at most 2, its part above 1 forgotten by half in 140 steps. A key that several heads
    read is left alone (grouped-query attention; the rotary key of latent attention), and the query
    rows that meet it take the whole factor.

    Status: orthogonal, to tolerance: max |W^T W / gain^2 - I| <= 1e-5 in float32 and 1e-11 in
    float64; half weights are kept in float32 by the handle, and as stored are off by their own
    rounding, at most 2 u + u^2: 8e-3 in bfloat16 and 1e-3 in float16 (u = 2^-8, 2^-11), reached
    where all entries of a column round the same way. Spectral, certified for the weight as stored,
    in every dtype (`wellposed.linalg.cap_spectral_norm_`); never by power iteration. Columns, up to
    the rounding u of their entries; nothing is claimed of ``|W|_2``, which may be ``bound`` times
    the root of their number. Logits, exact for the batch that was seen, whose largest logit would
    be b with the weights from before the step, or at most b if a fused kernel runs and ``bound`` is
    at least ``4 log(keys)``; that g covers what the step itself adds, and another
    batch, is empirical (at most 1.03 ``bound`` in 9 runs at rates up to 1e-2). A weight that is edited between steps
    (``load_state_dict``, ``copy_``, ``.data``) is back in its set after the next step in which it
    has a gradient; one without is left as it is. Moments of a square weight that free steps changed
    restart from zero, with a `ConstraintWarning`. `certify` measures the weights as they are and
    knows nothing of this handle.

    The weights stay plain parameters. Hooks on the optimizer retract them after its step. A square
    orthogonal weight
    steps in Lie coordinates: the optimizer sees ``skew(W^T G)`` and its step A is taken as
    ``W (I + A + A^2/2 - (W^T W - I)/2)``, with a cubic term, a polish or the exponential when A is
    large; it stays on the component of its start. A tall or wide one, and each part of a fused one,
    steps in the ambient space (projected gradient, polar retraction). Spectral and column weights
    step by their own gradient and are projected after it.
    This works with any optimizer that changes parameters by a step: AdamW, SGD, Adafactor, Muon
    (see `wellposed.constrain.MuonAndAdamW`). Gradient accumulation needs nothing; clipping sees the
    full gradient, before projection. Source: Absil, Mahony and Sepulchre 2008 (retractions);
    Edelman, Arias and Smith 1998 (tangent spaces).

    Weight decay is left out of the steps of orthogonal and column weights exactly, and one line says
    of how many: the constraint sets their size. Such a weight is zero while the optimizer steps, so
    an optimizer whose step depends on it (Adafactor, LAMB, LARS, Prodigy) is refused by its name.
    Spectral weights and logits may decay. See `wellposed.parameter_groups`.

    Attaching moves each weight to the nearest of the set (polar factor, singular values capped,
    columns divided by their lengths) and reports how far; weights already inside are not touched,
    so a resumed run goes on from the same weights. One line is logged (INFO), and a warning where a
    weight moves by more than a tenth of its norm. The dtype of an orthogonal weight may not change
    while it is held: call `remove`, turn the model, and constrain it again.

    Args:
        model: any module; DistributedDataParallel and ``torch.compile`` wrappers are looked
            through. With FSDP2 or tensor parallelism, call after sharding: one rank works on each
            matrix, and all travel there and back at once (two collectives a step, of orthogonal
            weights four). What two dimensions of a mesh cut is gathered by every rank, one at a time.
        optimizer: the optimizer that owns the weights, or several (Muon beside AdamW). Wrappers
            with an ``.optimizer`` attribute (Accelerate) are looked through. Where another
            optimizer steps in its place, a warning says so at the third of its steps.
        where: a dotted name, an fnmatch pattern (``"*.q_proj"``) or ``"re:"`` and a regular
            expression, matched against module paths (meaning their ``.weight``) and, if none fits,
            full parameter names, and if none fits, the names of `wellposed.roles.ROLE_NAMES`; a
            module type; or a list of names and types, each of which must match. The parts of a
            fused weight (GPT-2's ``c_attn``, ``in_proj_weight``, merged ``qkv`` and ``gate_up``) are
            held each by itself, and so are the matrices of each expert where those of all are one
            parameter (Mixtral, GPT-OSS).
        roles: names of roles, such as ``("query", "key")``, found by `find_roles`; added to what
            ``where`` matches. ``"layers"`` is every matrix of attention and feed-forward networks,
            of experts too, and no embedding or head. It is the default of ``to="spectral"`` if
            neither ``where`` nor ``roles`` is given; orthogonal and column weights must be chosen.
            ``"logits"`` holds the attention modules of which a query or key is chosen; without
            ``where`` and ``roles``, all.
        to: the set.
        per: ``"head"`` holds the rows of each head of a query, key or value by themselves: a head's
            (head_dim, width) rows are orthonormal, whatever other heads do. It is the one way
            where the rows of a role lie between those of others (GPT-NeoX, Bloom, Falcon).
        batch: what `find_roles` runs the model on, once, where its configuration does not say it;
            ``"logits"`` runs it once more for each attention module, to see that its logits follow.
        bound: of ``"spectral"`` the largest singular value allowed, of ``"columns"`` the length, of
            ``"logits"`` the largest logit; above 0. By default 1, of logits 100.
        gain: of ``"orthogonal"`` the common singular value, above 0, or ``"fit"`` for each weight's
            mean singular value to three digits, which moves it least. By default ``"fit"`` for a
            pretrained model of Hugging Face (one that knows where it was loaded from), 1 else. On
            MiniLM-L6 the largest moves are .67 of the norm of the queries (.70 with 1), .65 of the
            values (.73), .49 of feed-forward in (.70).
        embeddings: for ``"orthogonal"``. ``"refuse"`` raises where an embedding has more vectors
            than dimensions, which cannot be orthonormal; ``"fit"`` keeps every chosen embedding
            orthogonal on its smaller side, so that a tall one has orthogonal columns, ``E^T E = g^2
            I``, and no vector longer than g. In place of ``gain``, g is the embedding's mean
            singular value at the start, to three digits. It steps by its own gradient, not the
            projected one, so that tokens outside the batch move by the retraction alone.
        batched: work on all weights of one shape in one batched product; None does so but on a CPU
            for weights of more than 16,384 entries, for which a loop is faster.
        dry_run: print how far each weight would move, and the plan of a step
            (`wellposed.plan.Plan`); change nothing, and return an inactive handle with ``plan``.
            Of weights on the meta device print the plan alone. Logits have none.

    Returns:
        `Constraint` with ``.report`` (how far each weight moved), ``.error()``, ``.remove()``.

    Raises:
        RoleNotFoundError: ``where`` or ``roles`` matches nothing; near names are listed.
        ShapeError: a chosen parameter is no matrix and no stack of experts, or is an embedding
            with more vectors than dimensions.
        ConfigError: a parameter that no (or more than one) given optimizer owns, that is frozen,
            quantised, parametrised, not initialised yet (``nn.LazyLinear``), constrained already,
            float16 on a CPU, or decayed by such an optimizer; a misspelt keyword; what is no
            model; a part of a
            sharded weight; a zero column or factor that has no direction; an optimizer without
            steps; an option of another set; logits that do not follow the rows of their heads (L2,
            cosine and capped attention, normalised queries or keys, a bias of position, adapters),
            of a compiled or tensor parallel model, or without a batch where one is needed.
            Later, from ``optimizer.step()``, an orthogonal weight whose dtype has changed, or a
            name of the report under which the model has another weight, or none (untied, replaced,
            cut off, ``load_state_dict(assign=True)``).
        ConvergenceError: a weight is not finite; later, from ``optimizer.step()``, a step that is
            not finite (of logits, from the next one).

    Cost: a step adds 3 products of a square orthogonal weight's size while its steps are small (up
    to about 0.1 radians), 4 up to 0.4, 6 beyond; from 256 columns on a CPU saves a quarter of each
    but two. One d^3 matmul, forward and backward, is 3. A tall weight adds 4 and two small ones; a
    spectral one 2 while it is inside and 6 where it is capped, 35 where a step takes it more than
    an eighth above the bound; columns add a pass over the weight; logits less than 2 % of a step
    with a fused kernel and a bound of at least ``4 log(keys)``, and else one product of queries and
    keys, 3 to 6 % (width 256, 128 tokens, one core); on a GPU 40 launches and 10 a layer and no read.
    `torch.nn.MultiheadAttention` with dropout on a CPU, or returning its weights, adds its two
    projections, 9 %. Memory: one copy of each square orthogonal weight, a float32 copy of each half
    one. Attaching works on stacks of one shape: for each orthogonal weight 13 products (an SVD if its
    condition is above some 1e5), for a spectral one outside the bound one eigendecomposition.

    When not to use: a weight that must shrink or grow freely (use
    `wellposed.OrthogonalityPenalty`), or an optimizer that keeps its own copy of the weights
    (DeepSpeed ZeRO, schedule-free): the copy would undo the retraction.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    >>> handle = constrain_(model, optimizer, where="0")
    >>> capped = constrain_(model, optimizer, where="1", to="spectral", bound=0.5)
    >>> model(torch.randn(4, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> handle.error().worst < 1e-5, capped.error().worst
    (True, 0.0)
    """
    foreign = {"gain": gain not in (None, 1.0), "embeddings": embeddings != "refuse"}
    foreign |= {"per": per, "batched": batched} if to == "logits" else {}
    size = _size(to, bound, foreign)
    if to == "logits":
        check_not_compiled(model)
        roles, per = "query" if where is None and roles is None else roles, "head"
    is_default = to == "spectral" and where is None and roles is None
    roles = LAYERS if is_default else roles
    model = unwrap_model(model, "constrain_")
    if gain is None:
        gain = "fit" if getattr(getattr(model, "config", None), "_name_or_path", "") else 1.0
    embedded = [module for module in model.modules() if is_table(module)]
    tables = {id(module.weight): module for module in embedded}
    found = select_weights(model, where, roles=roles, per=per, batch=batch)
    if to not in ("orthogonal", "spectral", "logits") or isinstance(bound, str):
        found = [_oriented(place, tables) for place in found]
    attention = attention_of(model, found, batch) if to == "logits" else []
    if to == "logits":
        found = [part.place for role in attention for part in head_rows(role)]
    places = _merge_tied(model, found)
    tall_tables = tables if to == "orthogonal" and embeddings == "refuse" else {}
    owners = _check(places, _optimizers(optimizer), to, tall_tables)
    is_empty = dry_run and any(
        place.parameter.is_meta for place in places if place.parameter is not None
    )
    if not is_empty:
        _check_values(places, to, needs_size=gain == "fit")

    weights: list[ConstrainedMatrix] = []
    for place, owner in zip(places, owners, strict=True) if to != "logits" else ():
        is_frame = embeddings == "fit" and id(place.parameter) in tables
        given = ("fit" if is_frame else gain) if to == "orthogonal" else size
        chosen = _set_of(place, to, given, is_rms=isinstance(bound, str), is_frame=is_frame)
        weights.append(ConstrainedMatrix(place, owner, chosen))
    if to == "logits":
        owner_of = dict(zip((place.parameter for place in places), owners, strict=True))
        weights += held_logits(attention, model, owner_of, size, batch)
    handle = Constraint(model, weights, batched=batched)
    handle.check_decay(owners)
    if not is_empty:
        handle.report = ConstraintReport(start_weights(weights, dry_run=dry_run))
    summary = handle.report.summary(to) if handle.report.rows else ""
    if is_default:
        held = {id(place.parameter) for place in places}
        named = model.named_parameters()
        free = [name for name, each in named if each.ndim > 1 and id(each) not in held]
        summary += f": every matrix of the layers; free are {shortened(free) or 'no others'}"
    if dry_run:
        _print_moves(summary, handle.report.moved)
        handle.plan = None if to == "logits" else planned(model, weights, to).show()
    else:
        handle.attach()
        say_moves(logger, summary, handle.report.moved)
    return handle


def _print_moves(summary: str, moved: Mapping[str, float]) -> None:
    lines = [f"{path}: would move by {part:.2g}\n" for path, part in moved.items()]
    sys.stdout.writelines([f"{summary}\n", *lines] if moved else [])


def _set_of(
    place: Candidate, to: Set, size: float | Literal["fit"], *, is_rms: bool, is_frame: bool
) -> MatrixSet:
    """Return the set of one matrix."""
    assert place.parameter is not None  # _check raised for it
    if size == "fit":
        # The start finds the size.
        return Orthogonal(math.nan, TOLERANCES[place.parameter.dtype], is_steered=not is_frame)
    rows, columns = place.seen(place.parameter.detach()).shape
    scaled = size * math.sqrt(rows / columns) if is_rms else size
    return SETS.get(to)._of(scaled, place)


def _size(to: Set, bound: float | str | None, foreign: Mapping[str, object]) -> float:
    """Return the size that a bound gives a set; refuse unknown sets, and options of other sets."""
    SETS.get(to)
    if to == "orthogonal":
        foreign = {"bound": bound not in (None, 1.0)}
    names = [name for name, is_given in foreign.items() if is_given]
    if names:
        raise ConfigError(
            f"constrain_: to={to!r} has no {', '.join(names)}; the size of the set orthogonal is gain=, that of"
            " the others bound="
        )
    if bound is None:
        return 100.0 if to == "logits" else 1.0
    size = rms_radius(bound) if isinstance(bound, str) and to == "spectral" else bound
    if not isinstance(size, (int, float)) or not fits(size, Positive):
        raise ConfigError(
            f"constrain_: bound = {bound!r}, expected a finite number > 0, or of to='spectral' also"
            " 'rms:1' and the like"
        )
    return size


def _oriented(place: Candidate, tables: Mapping[int, nn.Embedding]) -> Candidate:
    """Orient a whole weight as (out, in), for sets that tell rows from columns."""
    if place.part:
        return place
    table = tables.get(id(place.parameter))
    padding = None if table is None else table.padding_idx
    flipped = table is not None or is_transposed(place.module)
    return replace(place, transposed=flipped, padding=padding)


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    inner: list[Optimizer] = []
    for entry in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        while isinstance(getattr(entry, "optimizer", None), Optimizer):
            entry = entry.optimizer  # pyright: ignore[reportAttributeAccessIssue]
        name = type(entry).__name__
        if not isinstance(entry, Optimizer) or not hasattr(entry, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"constrain_: expected a torch.optim.Optimizer, whose step has hooks, received {name}"
            )
        if name in _NO_STEPS:
            problem = f"{name} does not take one step from one gradient"
            raise ConfigError(f"constrain_: {problem}; use AdamW, SGD, Adafactor or Muon")
        inner.append(entry)
    return inner


def _merge_tied(model: nn.Module, found: list[Candidate]) -> list[Candidate]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    merged: dict[object, Candidate] = {}
    for index, place in enumerate(found):
        key = index if place.parameter is None else (id(place.parameter), place.entry, place.rows)
        own, known = place.parameter_name, names.get(id(place.parameter), [])
        others = tuple(name for name in known if name != own)
        if others and key not in merged:
            logger.warning("%s is tied to %s; constrained once", own, ", ".join(others))
        merged.setdefault(key, replace(place, also=others))
    return list(merged.values())


def _check(
    places: Sequence[Candidate],
    optimizers: list[Optimizer],
    to: Set,
    tall_tables: Mapping[int, nn.Embedding],
) -> list[Optimizer]:
    """Return the optimizer of each weight, or raise with every weight that cannot be held."""
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(optimizer)
    given = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    found: list[tuple[str, ConfigError | ShapeError]] = []
    for place in places:
        key = id(place.parameter)
        own, is_tall = owners.get(key, []), key in tall_tables
        problems = _problems(place, own, given, is_tall_table=is_tall)
        found += [(place.label, problem) for problem in islice(problems, 1)]
    if found:
        found.sort(key=lambda pair: isinstance(pair[1], ConfigError))  # shapes first
        lines = listed([f"{name}: {problem}" for name, problem in found])
        raise type(found[-1][1])(f"constrain_ cannot keep these weights in the set {to}:\n{lines}")
    return [owners[id(place.parameter)][0] for place in places]


def _problems(
    place: Candidate, held: list[Optimizer], given: str, *, is_tall_table: bool
) -> Iterator[ConfigError | ShapeError]:
    """Yield why a weight cannot be held; what follows supposes that it was not so."""
    parameter = place.parameter
    if parameter is None:
        how = "computes or packs its weight (a parametrisation, a hook, or quantised)"
        yield ConfigError(f"{type(place.module).__name__} {how}; a plain nn.Parameter is needed")
        return
    if parameter.dtype not in TOLERANCES or parameter.is_quantized:
        kind = f"{type(parameter).__name__} of {parameter.dtype}, quantised or not floating"
        yield ConfigError(f"{kind}; expected float32, float64, bfloat16 or float16")
    if parameter.dtype == torch.float16 and parameter.device.type == "cpu":
        yield ConfigError("float16 on a CPU; load it in float32 or bfloat16, or move it to a GPU")
    shape = tuple(parameter.shape)
    if len(shape) != 2 + (place.entry is not None) or 0 in shape:
        stack = "; a pass over batch= shows experts in a stack" if len(shape) == 3 else ""
        flat = "; FSDP1 flattens parameters, use fully_shard (FSDP2)"
        yield ShapeError(
            f"shape {shape}, expected a matrix (rows, columns); narrow where=, or give module"
            f" types{flat if '_flat_param' in place.name else stack}"
        )
    if is_tall_table and shape[0] > shape[1]:
        yield ShapeError(
            f"an embedding of {shape[0]} vectors in {shape[1]} dimensions, and at most {shape[1]}"
            " vectors can be orthonormal there; give embeddings='fit' to keep its columns"
            " orthogonal, or use wellposed.OrthogonalityPenalty(model, embedding=...) to push its"
            " Gram matrix"
        )
    adapted = ", or name its adapter's factors, as in where='*.lora_A.*'"
    if not parameter.requires_grad:
        more = adapted if place.is_adapted else ""
        yield ConfigError(f"frozen (requires_grad is False); unfreeze it or leave it out{more}")
    if place.is_adapted:
        yield ConfigError(f"the layer adds an adapter to it; merge and unload that{adapted}")
    if is_sharded(parameter) and place.part:
        what = "a part of a fused weight that is sharded"
        yield ConfigError(f"{what}; leave its module out of fully_shard, or leave it out here")
    if len(held) != 1:
        yield ConfigError(
            f"{'owned by more than one' if held else 'not owned by the'} given optimizer ({given});"
            " build the optimizer from the parameters of this very model, after moving, sharding or"
            " tying it"
        )
    if any(handle.holds(place) for handle in handles_of(held[0])):
        yield ConfigError("constrained already; call remove() on the first handle")


def _check_values(places: Sequence[Candidate], to: Set, *, needs_size: bool) -> None:
    """Refuse what has no nearest matrix in the set: values that are not finite, zero columns, and
    where a size or a direction is to be kept, zeros."""
    empty: list[str] = []
    broken: list[str] = []
    if meta := [place.label for place in places if place.parameter.is_meta]:  # pyright: ignore
        problem = "constrain_: on the meta device, without values; load the weights first, or plan"
        raise ConfigError(f"{problem} by dry_run=True:\n{listed(meta)}")
    for place in places:
        assert place.parameter is not None  # _check raised for it
        value = place.seen(read(place.parameter))
        zeros = value.eq(0).all(dim=0)
        if place.padding is not None:
            zeros[place.padding] = False
        counts = torch.stack(((~value.isfinite()).sum(), zeros.sum(), zeros.int().argmax()))
        bad, lost, first = counts.tolist()
        if bad:
            broken.append(f"{place.label}: {bad} of {value.numel()} entries")
        if to == "columns" and lost:
            empty.append(f"{place.label}: {lost} zero columns, the first at {first}")
        elif to == "orthogonal" and needs_size and lost == len(zeros):
            empty.append(f"{place.label}: zero, as an adapter's last factor starts")
    if broken:
        raise ConvergenceError(
            "constrain_: these weights hold NaN or infinity, so there is no nearest one in the set;"
            f" load an earlier checkpoint:\n{listed(broken)}"
        )
    if empty:
        raise ConfigError(
            "constrain_: these have no direction to keep; choose others (where='*.lora_A.*'), or"
            f" to='spectral', in which zero may stay:\n{listed(empty)}"
        )
