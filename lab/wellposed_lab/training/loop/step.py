"""One step: the gradient of the mean loss per target over all micro-batches of all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

from wellposed.errors import ConfigError
from wellposed_lab.tasks.batches import IGNORED_LABEL
from wellposed_lab.tasks.task import Kind, Task
from wellposed_lab.training.config import TrainOptions, words_of
from wellposed_lab.training.folder.state import StepNumbers
from wellposed_lab.training.loop import batches
from wellposed_lab.training.loop.batches import Batch
from wellposed_lab.training.loop.machine import sum_over_processes
from wellposed_lab.training.loop.penalty_pull import pulls_of


def rows_of(kind: Kind, labels: Tensor) -> Tensor:
    """Return the class of each row of logits (-100: not counted), for a language model the next
    token. An encoder-decoder, whose decoder has no certificate, is a `ConfigError`.

    >>> import torch
    >>> rows_of("causal_lm", torch.tensor([[5, 3, -100]])).tolist()
    [[3, -100, -100]]
    """
    if kind == "seq2seq_lm":
        raise ConfigError(
            "margin_radius is for classifiers and language models, received an encoder-decoder,"
            " whose decoder has no certificate; leave margin_radius at 0"
        )
    if kind != "causal_lm":
        return labels
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def certified_logits(logits: Tensor, rows: Tensor, model: nn.Module, radius: float) -> Tensor:
    r"""Return ``z_k + r |w_y - w_k|_2`` for the class y of each row; y's own logit stays the same.

    Status: exact. If the body is 1-Lipschitz, moving the input by r changes ``z_k - z_y`` by at
    most ``|w_y - w_k| r``. So the cross entropy of these logits bounds that of every input within r
    (Lipschitz-margin training, Tsuzuku, Sato, Sugiyama 2018, algorithm 1, but with the slope of
    each pair instead of ``sqrt(2) L``).

    Args:
        logits: ``(..., classes)``, before the logit scale.
        rows: ``(...)`` class numbers, -100 if a row does not count; see `rows_of`.
        model: Ends in a linear layer with a row for each class: ``classifier`` (pairs:
            ``classifier.output``; language models: ``lm_head``).
        radius: R >= 0 in units of the model's input, such as 0.1 for tokens of norm 1.

    Raises:
        ConfigError: the model has no such layer, or the labels are not one class for each row.

    Cost: O(c classes width) for the c classes in ``rows``. When not to use: if the body's Lipschitz
    constant is not about 1, r means something else.
    """
    head = getattr(model, "classifier", getattr(model, "lm_head", None))
    head = getattr(head, "output", head)
    if not isinstance(head, nn.Linear) or rows.shape != logits.shape[:-1]:
        raise ConfigError(
            f"margin_radius = {radius:g} is for models that end in a linear layer, `classifier`,"
            f" `classifier.output` or `lm_head`; received a {type(model).__name__} with logits"
            f" {tuple(logits.shape)} and labels {tuple(rows.shape)}; leave margin_radius 0"
        )

    classes, inverse = rows.clamp_min(0).unique(return_inverse=True)
    # Not by matrix products, whose rounding scales with the squared weights.
    mode = "donot_use_mm_for_euclid_dist"
    gaps = torch.cdist(head.weight[classes], head.weight, compute_mode=mode)
    return logits + radius * gaps[inverse].to(logits.dtype)


Penalty = Callable[[], torch.Tensor]


def scaled(logits: torch.Tensor, options: TrainOptions) -> torch.Tensor:
    """Return the logits times the logit scale, for losses and metrics."""
    return logits if options.logit_scale == 1 else options.logit_scale * logits


def autocast(device: torch.device, options: TrainOptions) -> AbstractContextManager[object]:
    """Return the context of a forward pass: autocast if configured."""
    if options.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def training_loss(
    model: nn.Module,
    unwrapped: nn.Module,
    task: Task,
    batch: Batch,
    options: TrainOptions,
    *,
    progress: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the summed loss of a batch, its number of targets, and the model's own loss or None.
    ``model`` runs forward, ``unwrapped`` gives margins; a loss of words grows with ``progress``."""
    words = words_of(options.margin_loss) * min(1.0, 2 * progress)
    with autocast(next(iter(batch.values())).device, options):
        logits, auxiliary, output = batches.forward_with_auxiliary(model, batch)
        if words:
            from wellposed.words import word_logits

            logits = word_logits(logits, batch, unwrapped, words, getattr(output, "votes", None))
        if options.margin_radius:
            rows = rows_of(task.kind, batch["labels"])
            logits = certified_logits(logits, rows, unwrapped, options.margin_radius)
        logits = scaled(logits, options)
        return *task.loss_sum(logits, batch, label_smoothing=options.label_smoothing), auxiliary


def compute_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    task: Task,
    micro_batches: Sequence[Batch],
    options: TrainOptions,
    *,
    penalty: Penalty | None = None,
    weights_penalty: Penalty | None = None,
    check_targets: bool = False,
    progress: float = 1.0,
    pulls: dict[str, float] | None = None,
) -> StepNumbers:
    """Compute the gradient of ``sum of losses / targets + penalties + auxiliary`` in ``.grad``.

    Status: exact to rounding. All micro-batches of all processes count as one batch. The penalty
    and the model's own loss (``output.auxiliary_loss``) of a micro-batch are weighted by its
    fraction of the sequences; ``weights_penalty``, which reads no batch, is computed once. The global
    norm is clipped to ``max_grad_norm``; ``progress`` as in `training_loss`. ``pulls`` gets the
    norms of the penalty's own gradient (`pulls_of`).

    Cost: a bare step, one device-to-host transfer of four numbers, and one all-reduce of three
    integers with several processes.
    """
    counts = (task.target_count, batches.sequence_count, batches.token_count)
    mine = torch.tensor([sum(map(count, micro_batches)) for count in counts])
    world = accelerator.num_processes
    targets, sequences, tokens = sum_over_processes(accelerator, mine).tolist()
    per_target = world / max(1, targets)
    device = accelerator.device
    sums = torch.zeros(3, device=device)  # of losses, penalties and the model's own losses
    has_auxiliary = False
    counted = 0.0
    unwrapped = accelerator.unwrap_model(model)
    share_of_process = int(mine[1]) / sequences
    for number, batch in enumerate(micro_batches):
        share = batches.sequence_count(batch) / sequences
        batch = batches.to_device(batch, device)
        last = number == len(micro_batches) - 1
        # DistributedDataParallel averages over processes, hence `world`; its all-reduce waits for
        # the last micro-batch.
        with nullcontext() if last or world == 1 else accelerator.no_sync(model):
            batch_sum, count, auxiliary = training_loss(
                model, unwrapped, task, batch, options, progress=progress
            )
            loss = batch_sum * per_target
            terms = []
            if penalty is not None:
                terms.append((penalty(), share))
            if weights_penalty is not None and number == 0:
                terms.append((weights_penalty(), share_of_process))
            if terms:
                if pulls is not None and number == 0:
                    pulls |= pulls_of(torch.stack([value for value, _ in terms]).sum(), unwrapped)
                term = torch.stack([value * part for value, part in terms]).sum()
                sums[1] += term.detach()
                loss = loss + term * world
            if auxiliary is not None:
                has_auxiliary = True
                sums[2] += auxiliary.detach() * share
                loss = loss + auxiliary * (share * world)
            accelerator.backward(loss)
        sums[0] += batch_sum.detach()
        if check_targets:
            counted += float(count)

    if check_targets:
        batches.check_target_count(task, int(mine[0]), counted)
    # Accelerate's own clipping searches the disk for optional packages at every call (0.5 ms).
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
    sums = sum_over_processes(accelerator, sums)
    loss_sum, penalties, auxiliary_sum, norm_number = torch.cat([sums, norm.reshape(1)]).tolist()
    auxiliary_sum = auxiliary_sum if has_auxiliary else None
    return StepNumbers(loss_sum, targets, penalties, norm_number, tokens, auxiliary_sum)
