"""Mixed precision, checkpointing, compilation, several processes, and `transformers.Trainer`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attoscope.errors import AttoscopeError
from attoscope.monitor import watch
from tests.models import VOCABULARY, Nano
from tests.monitor.build import Checkpointed, batch, loss_of, nothing_is_left, same, train
from tests.monitor.test_watching import gpt2

ROOT = Path(__file__).parent.parent.parent


def test_autocast() -> None:
    model = Nano(fused=True)
    plain, _ = train(copy.deepcopy(model), autocast=True)
    exact, full = train(copy.deepcopy(model), lambda m: watch(m, every=2))
    watched, log = train(model, lambda m: watch(m, every=2), autocast=True)
    assert same(plain, watched) and not same(plain, exact)
    # Same weights at step 0: scores differ by what bfloat16 rounds, and no more.
    for key in ("score_scale/decoder.1", "norm/decoder.1", "gradient_norm"):
        assert log.rows[0][key] != full.rows[0][key]
        assert log.rows[0][key] == pytest.approx(full.rows[0][key], rel=0.02)


def test_scaled_losses() -> None:
    model = Nano().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    with watch(model, every=1) as log:
        for bad in (False, True, False):
            loss = loss_of(model, batch())
            scaler.scale(loss).backward()
            if bad:
                model.head.bias.grad[0] = torch.inf
            else:
                grads = [p.grad for p in model.parameters()]
                norms.append(float(nn.utils.get_total_norm(grads)) / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    # The step that the scaler left out is none: its pass counts with the next.
    assert log.count == 2
    assert [row["passes"] for row in log.rows] == [1, 2]
    assert [row["gradient_norm"] for row in log.rows] == pytest.approx(norms, rel=1e-4)


def test_a_fused_optimiser_that_scales_by_itself() -> None:
    model = Nano().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, every=1) as log:
        scaler.scale(loss_of(model, batch())).backward()
        norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) / 1024
        scaler.step(optimizer)
    assert log.rows[0]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert log.rows[0]["adam_surprise/decoder.1"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    model = Checkpointed()
    plain, _ = train(copy.deepcopy(model))
    watched, log = train(model, lambda m: watch(m, every=2))
    assert same(plain, watched) and nothing_is_left(model)
    assert [(row["step"], row["passes"]) for row in log.rows] == [(0, 1), (2, 1), (4, 1)]
    assert len(log.reading("norm")) == len(log.reading("gradient_rms")) - 1 == 3


def test_a_model_that_is_checkpointed_whole() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=1) as log:
        for _ in range(2):
            x = batch()
            logits = checkpoint(model, x, use_reentrant=False)
            logits.float().mean().backward()
            optimizer.step()
    assert [row["passes"] for row in log.rows] == [1, 1]


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


def test_compiled_models_are_read_beside_their_pass(fresh_compiler: None) -> None:
    from torch._dynamo.utils import counters

    model = Nano(fused=True)
    other = copy.deepcopy(model)
    plain, _ = train(other, call=compiled(other, fullgraph=True))
    once = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()
    call = compiled(model, fullgraph=True)
    watched, log = train(model, lambda m: watch(m, every=2), call=call)
    assert same(plain, watched) and nothing_is_left(model)
    assert counters["stats"]["unique_graphs"] == once == 1
    assert [row["step"] for row in log.rows] == [0, 2, 4]
    assert len(log.reading("margin")) == 3 and "gradient_rms/decoder.2" in log.rows[0]


def test_what_is_compiled_elsewhere_is_said(fresh_compiler: None) -> None:
    model = Nano(fused=True).train()
    call = compiled(model)
    with pytest.warns(UserWarning, match="the result of torch.compile"):
        train(model, lambda _: watch(model, every=2), call=call)
    assert nothing_is_left(model)
    model.compile(backend="aot_eager")
    with pytest.raises(AttoscopeError, match="compiled in place"):
        watch(model)


SCRIPT = """
import json, sys, torch
from torch.nn.parallel import DistributedDataParallel
from attoscope.monitor import watch
from tests.models import Nano, VOCABULARY
from tests.monitor.build import BATCH, TOKENS, loss_of
torch.set_num_threads(1)
rank, meeting = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method="file://" + meeting, rank=rank, world_size=2
)
torch.manual_seed(0)
model = Nano().train()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(rank)
norms = []
with watch(ddp, every=2) as log:
    for _ in range(3):
        for last in (False, True):
            x = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=draw)
            ddp.require_backward_grad_sync = last
            loss_of(ddp, x).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
rows = [[r["step"], r["passes"], r["gradient_norm"], "margin/decoder.2" in r] for r in log.rows]
print(json.dumps({"count": log.count, "rows": rows, "norms": norms}))
torch.distributed.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = [process.communicate(timeout=150) for process in started]
    assert all(process.returncode == 0 for process in started), done
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in done)
    assert first["count"] == second["count"] == 3
    assert second["rows"] == []
    assert [row[:2] for row in first["rows"]] == [[0, 2], [2, 2]]
    # The gradient is that of both processes.
    assert first["norms"] == second["norms"]
    assert [row[2] for row in first["rows"]] == pytest.approx(first["norms"][::2], rel=1e-5)
    assert all(row[3] for row in first["rows"])


def fine_tuned(folder: Path, callbacks: list[Any]) -> tuple[Any, list[Any]]:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = gpt2()
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (10,), generator=draw) for _ in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, logging_steps=1,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer, [p.detach().clone() for p in model.parameters()]


def test_the_trainer(tmp_path: Path) -> None:
    from attoscope.monitor.callback import TrainerCallback

    told: list[dict[str, float]] = []
    callback = TrainerCallback(every=2, loggers=[told.append])
    trainer, watched = fine_tuned(tmp_path, [callback])
    _, plain = fine_tuned(tmp_path, [])
    assert all(map(torch.equal, plain, watched))
    log = callback.log
    assert log is not None and told == log.rows
    assert [(row["step"], row["passes"]) for row in log.rows] == [(0, 2), (2, 2), (4, 2)]
    assert log.count == 5 and nothing_is_left(trainer.model)
    assert "loss" in log.rows[0] and "normalised_entropy/decoder.1" in log.rows[0]


def test_a_callback_that_is_dropped_takes_its_hooks_along() -> None:
    from attoscope.monitor.callback import TrainerCallback

    model, arguments = Nano(), SimpleNamespace(torch_compile=False)
    callback = TrainerCallback()
    callback.on_train_begin(arguments, None, None, model=model)
    assert not nothing_is_left(model)
    del callback
    assert nothing_is_left(model)
    with pytest.raises(AttoscopeError, match="torch_compile=True"):
        TrainerCallback().on_train_begin(SimpleNamespace(torch_compile=True), None, None)
