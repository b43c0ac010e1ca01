"""A monitored step of FSDP2 over two processes gives the numbers of one process."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from wellposed import hooks
from wellposed.measurement import Monitor, measure


def encoder():
    """Queries, keys and values in one weight of 18 rows, of which the second process begins within
    the keys; 5 rows, which two cannot share evenly."""
    layer = nn.TransformerEncoderLayer(6, 2, 5, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.double(), model.layers, (torch.randn(4, 3, 6, dtype=torch.float64),)


def gpt2():
    """Weights that are stored transposed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 6, "n_head": 2, "n_layer": 2, "vocab_size": 7, "n_positions": 8}
    dropped = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes, **dropped))
    return model.double(), model.h, (torch.tensor([[3, 1, 4, 1, 5], [0, 2, 6, 5, 3]]),)


def numbers(kind, cut):
    """Those of four steps, how many collectives the third, which is measured, has more than the
    fourth, and `measure`."""
    torch.manual_seed(3)
    model, layers, inputs = kind()
    for part in (*layers, model) if cut else ():
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every=2)
    rows = []
    calls = []
    for _ in range(4):
        counted = CommDebugMode()
        with counted if cut else nullcontext():
            hooks.first_tensor(model(*inputs)).square().mean().backward()
            optimizer.step()
            rows.append(monitor.step())
        optimizer.zero_grad()
        calls.append(sum(counted.get_comm_counts().values()))
    monitor.remove()
    measured = [measure(model, spectra=spectra).rows for spectra in (True, False)]
    return {"rows": rows, "more": calls[2] - calls[3], "measure": measured}


def worker(rank, store, out):
    torch.set_num_threads(1)
    wait = timedelta(seconds=100)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait
    )
    torch.save([numbers(kind, cut=True) for kind in (encoder, gpt2)], f"{out}{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    mp.spawn(worker, args=(str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    expected = [numbers(kind, cut=False) for kind in (encoder, gpt2)]
    for rank in (0, 1):
        for mine, alone in zip(torch.load(tmp_path / f"out{rank}"), expected, strict=True):
            # one exchange of weights, and two sums: of squared norms, and of numbers
            assert mine["more"] == 3
            assert any(name.endswith("query/update") for name in mine["rows"][0])
            for row_here, row_alone in zip(mine["rows"], alone["rows"], strict=True):
                assert row_here == pytest.approx(row_alone, rel=1e-9, abs=1e-12)
            for row_here, row_alone in zip(mine["measure"], alone["measure"], strict=True):
                assert row_here == [{name: close(row[name]) for name in row} for row in row_alone]


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float | list) else value
