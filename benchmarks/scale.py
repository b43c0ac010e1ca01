"""Write docs/scale.md: cost of each verb on large models and many ranks.

    python -m benchmarks.scale

The models are on the meta device, sharded by FSDP2 over PyTorch's fake process group. Plans of
`constrain_` are of all layers. Penalty and `Monitor` run on few layers; each other layer costs as
much as one more of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from wellposed.constrain import constrain_
from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty
from wellposed.plan import TOKENS, Plan, in_units, model_flops_per_token

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RANKS = (8, 256, 1024)
UNPLANNED = "not planned"
"""Memory of many experts: with few, the peak is in layers without experts."""
LATENT = ("*.q_a_proj", "*.q_b_proj", "*.kv_a_proj_with_mqa", "*.kv_b_proj", "*.o_proj")
# Weights of all tokens: of layers without experts, and of the shared expert.
DENSE = tuple(
    f"re:.*(layers.[0-9]+.mlp|shared_experts).{name}_proj" for name in ("gate", "up", "down")
)


@dataclass(frozen=True)
class Size:
    """Numbers of layers without experts, of layers with them, and of experts per layer."""

    dense: int
    sparse: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Scaled:
    """A model of any size, and its constrained weights."""

    make: Callable[[Size], nn.Module]
    full: Size
    attention: tuple[str, ...] = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj")
    networks: tuple[str, ...] = ("*.gate_proj", "*.up_proj", "*.down_proj")
    strengths: tuple[str, ...] = ("attention", "feedforward")
    has_constrained_experts: bool = False
    """Whether ``networks`` are the experts; else they are weights of all tokens."""


def llama(width: int, heads: int, inner: int) -> Callable[[Size], nn.Module]:
    """Return a maker of Llama-3 with 8 heads of keys and values."""

    def make(size: Size) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                num_hidden_layers=size.dense,
                num_attention_heads=heads,
                num_key_value_heads=8,
                intermediate_size=inner,
                vocab_size=128256,
            )
        )

    return make


def deepseek(size: Size) -> nn.Module:
    """Return DeepSeek-V3 with one module per expert, as in its checkpoint."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    layers = size.dense + size.sparse
    config = DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=size.dense, n_routed_experts=256
    )
    model = DeepseekV3ForCausalLM(config)
    sparse: Any = list(model.model.layers)[size.dense].mlp
    network = partial(
        type(sparse.shared_experts), config, intermediate_size=config.moe_intermediate_size
    )
    return with_expert_modules(model, network, size.experts, first=size.dense)


def with_expert_modules(
    model: nn.Module, network: Callable[[], nn.Module], count: int, *, first: int = 0
) -> nn.Module:
    """Give every layer from ``first`` on one module per expert, as in the model's checkpoint."""
    body: Any = model.model
    for layer in list(body.layers)[first:]:
        layer.mlp.experts = nn.ModuleList(network() for _ in range(count))
    return model


def mixtral(size: Size) -> nn.Module:
    """Return Mixtral 8x7B with one module per expert, as in its checkpoint."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    config = MixtralConfig(num_hidden_layers=size.sparse)
    network = partial(Qwen3MoeMLP, config, config.intermediate_size)
    return with_expert_modules(MixtralForCausalLM(config), network, size.experts)


def qwen3_moe(size: Size) -> nn.Module:
    """Return Qwen3-235B-A22B with one module per expert, as in its checkpoint."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    config = Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=size.sparse, num_attention_heads=64, head_dim=128,
        num_key_value_heads=4, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936,
    )  # fmt: skip
    network = partial(Qwen3MoeMLP, config, config.moe_intermediate_size)
    return with_expert_modules(Qwen3MoeForCausalLM(config), network, size.experts)


MODELS = {
    "Llama-3 8B": Scaled(llama(4096, 32, 14336), Size(32)),
    "Llama-3 70B": Scaled(llama(8192, 64, 28672), Size(80)),
    "Llama-3 405B": Scaled(llama(16384, 128, 53248), Size(126)),
    "Mixtral 8x7B": Scaled(mixtral, Size(0, 32, 8), has_constrained_experts=True),
    "Qwen3-235B-A22B": Scaled(qwen3_moe, Size(0, 94, 128), networks=()),
    "DeepSeek-V3": Scaled(deepseek, Size(3, 58, 256), LATENT, DENSE, ("feedforward",)),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("wellposed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def ranks_without_machines(ranks: int) -> Iterator[Any]:
    """Act as one of ``ranks`` ranks whose collectives send nothing; yield their mesh."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def made(model: Scaled, size: Size) -> Any:
    with torch.device("meta"):
        return model.make(size)


def sharded(model: Scaled, size: Size, mesh: Any) -> nn.Module:
    """Return a model without values, with each layer sharded."""
    empty = made(model, size)
    for layer in empty.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(empty, mesh=mesh)


def constrained(model: Scaled, size: Size, mesh: Any, where: tuple[str, ...], to: str) -> Plan:
    empty = sharded(model, size, mesh)
    optimizer = torch.optim.SGD(empty.parameters(), lr=1e-2)
    plan = constrain_(empty, optimizer, where=where, to=to, dry_run=True).plan
    assert plan is not None
    return plan


def extended(model: Scaled, mesh: Any, verb: Callable[[nn.Module], Any]) -> Plan:
    """Plan a verb on few layers; add the cost of one more for each of the others."""

    def planned(size: Size) -> Plan:
        return verb(sharded(model, size, mesh)).plan

    full = model.full
    if not full.sparse:
        small = planned(Size(2))
        return _sum(small, (planned(Size(4)), small, (full.dense - 2) / 2))
    small = planned(Size(full.dense, 1, 4))
    expert = planned(Size(full.dense, 1, 8)), small, full.sparse * (full.experts - 4) / 4
    layer = planned(Size(full.dense, 2, 4)), small, full.sparse - 1
    return replace(_sum(small, expert, layer), notes=(UNPLANNED,))


def _sum(small: Plan, *steps: tuple[Plan, Plan, float]) -> Plan:
    """Add the differences of pairs of plans, multiplied by their third entries."""

    def total(number_of: Callable[[Plan], float]) -> int:
        more = (times * max(0, number_of(a) - number_of(b)) for a, b, times in steps)
        return round(number_of(small) + sum(more))

    def counts(count: Callable[[Plan], Any]) -> dict[Any, int]:
        keys = dict.fromkeys(
            key for plan in (small, *(a for a, _, _ in steps)) for key in count(plan)
        )
        return {key: total(lambda plan, key=key: Counter(count(plan))[key]) for key in keys}

    return replace(
        small,
        matrices=counts(lambda plan: plan.matrices),
        flops_by_rank=(total(lambda plan: plan.flops_by_rank[0]),) * len(small.flops_by_rank),
        collectives=counts(lambda plan: plan.collectives),
        sent_bytes=total(lambda plan: plan.sent_bytes),
        peak_bytes=total(lambda plan: plan.peak_bytes),
    )


def plans(name: str, ranks: int, only: tuple[str, ...] = ()) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of a model under their names on the page."""
    model = MODELS[name]
    flops = model_flops_per_token(made(model, model.full))
    strengths: dict[str, Any] = {
        "attention_mode": "separate",
        **dict.fromkeys(model.strengths, 1e-4),
    }
    few = model.full
    if not model.has_constrained_experts:
        few = replace(few, experts=min(1, few.experts))
    rows: dict[str, Callable[[Any], Plan]] = {
        "constrain_ orthogonal": lambda mesh: constrained(
            model, few, mesh, model.attention, "orthogonal"
        ),
        "constrain_ spectral": lambda mesh: constrained(
            model, few, mesh, (*model.attention, *model.networks), "spectral"
        ),
        "penalty": lambda mesh: extended(
            model, mesh, lambda part: OrthogonalityPenalty(part, **strengths, dry_run=True)
        ),
        "Monitor": lambda mesh: extended(
            model, mesh, lambda part: Monitor(part, vitals=False, dry_run=True)
        ),
    }
    for row, plan_of in rows.items():
        if not only or row in only:
            with quiet(), ranks_without_machines(ranks) as mesh:
                plan = plan_of(mesh)
            yield row, replace(plan, model_flops_per_token=flops)


def line(ranks: int, name: str, plan: Plan) -> str:
    calls = sum(plan.collectives.values())
    memory = f"{in_units(plan.kept_bytes)}B + {in_units(plan.peak_bytes)}B"
    cells = (
        f"{ranks:,}",
        name,
        f"{sum(plan.matrices.values()):,}",
        f"{in_units(sum(plan.flops_by_rank))}FLOP",
        f"{100 * plan.share():.3g} %",
        f"{in_units(plan.sent_bytes)}B",
        f"{calls:,}",
        f"{plan.balance:.2f}",
        UNPLANNED if UNPLANNED in plan.notes else memory,
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    lines = [HEAD]
    for name in MODELS:
        lines += ["", f"## {name}", "", *COLUMNS]
        for ranks in RANKS:
            lines += [line(ranks, row, plan) for row, plan in plans(name, ranks)]
    return "\n".join((*lines, ""))


COLUMNS = (
    "| ranks | verb | matrices | FLOPs a step | share | sent | collectives | balance | memory |",
    "|---|---|---|---|---|---|---|---|---|",
)
HEAD = f"""# At scale: what a step costs on 8 to 1,024 ranks

Made by `python -m benchmarks.scale`; do not edit. Nothing here was timed: the models have no values (the meta device),
and FSDP2 shards them over PyTorch's fake process group. One keyword plans your own model on any device, before you rent
a machine:

```python
import torch, wellposed as wp

with torch.device("meta"):
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True), 32)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
plan = wp.constrain_(model, optimizer, where=("query", "key"), dry_run=True).plan
print(plan.summary(tokens=8192))
plan = wp.OrthogonalityPenalty(model, feedforward=1e-4, dry_run=True).plan
plan = wp.Monitor(model, dry_run=True).plan
```

Under FSDP2, plan after `fully_shard`. A `wellposed.plan.Plan` also has `matrices_by_rank` and `flops_by_rank`.

- **FLOPs a step**: matrix products of all ranks together. **balance**: the busiest rank over the mean of all. If there
  are fewer matrices than ranks, some ranks have none.
- **share**: FLOPs of the busiest rank over those of the model on its own {TOKENS:,} tokens, 6 x parameters x tokens
  (active experts only). With twice the tokens the share is half. The verbs multiply in float32, models often in
  bfloat16.
- **sent**: bytes by each rank in a step. **memory**: of the busiest rank between steps, and the addition within one.
- `constrain_ orthogonal` constrains query, key, value and output weights, `constrain_ spectral` also the feed-forward
  weights, all of which leave the set in each step. The penalty is on the same weights, each by itself.
- `Monitor` measures all weights, without vital signs, in one step of 100 (default). It is counted on the first rank,
  which works on the costliest weight. So the share is that of the busiest rank, and FLOPs assume equally busy ranks.
  With many experts on few ranks both are too low: in the small sizes that are counted, it has that weight alone.
- Each expert is a module, as in the checkpoints. In Mixtral all of them are constrained. In DeepSeek-V3 and Qwen3-MoE
  `constrain_` constrains the weights of all tokens (in Qwen3-MoE attention), not the 256 or 128 experts of a layer.
  Penalty and `Monitor` cover all feed-forward weights, experts included. In DeepSeek-V3 they leave out attention: names
  alone do not reveal the weights of latent attention.
- Weights are in float32. Plans of `constrain_` are of all layers. Penalty and `Monitor` are counted on two small sizes
  of the model, and each additional layer or expert costs the difference. This does not give memory with experts."""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
