"""What benchmarks/gpu.py computes, on a CPU with tiny sizes."""

import sys

import gpu
import pytest
import torch
from floor import Lengths, training_flops
from stopwatch import PHASES
from work import SIZES, Job, make_models

TINY = SIZES["tiny-qwen"]


def test_the_bytes_of_a_rollout_are_those_of_its_passes_one_by_one():
    lengths = Lengths(prompts=[3, 5], responses=[4, 2])
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128) + 128 * 256
    read = 0
    for number in range(4):  # the pass that makes the token of this number
        read += weights
        for prompt, response in ((3, 4), (5, 2)):
            if 0 < number < response:
                read += (prompt + number) * 2 * TINY.layers * 64
    assert gpu.decode_bytes(TINY, lengths) == 2 * read


def test_a_row_has_the_shares_of_what_bandwidth_and_products_allow():
    job = Job(models="", size="tiny-qwen", regime="none", num_prompts=2, prompt_tokens=8, new_tokens=6)
    lengths = Lengths([len(prompt) for prompt in job.prompts()], [6, 5])
    seconds = {"rollout": 2.0, "scoring": 1.0, "training": 4.0}
    rates = {
        "bytes_per_second": gpu.decode_bytes(TINY, lengths),  # a floor of one second
        "flops_per_second": training_flops(job, lengths) / 3,  # and of three
    }
    steps = [{**seconds, "lengths": [6, 5]}] * 2
    assert gpu.row(job, steps, **rates) == pytest.approx([2, 1, 4, 7, 11 / 2, 1 / 2, 3 / 4, 11])


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(gpu, "_best_seconds", lambda work, device: work() is None or 0.5)
    assert gpu.bandwidth("cpu", num_bytes=100) == 400
    assert gpu.product_rate("cpu", width=10) == 4000


def test_a_machine_without_cuda_is_told_so_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 2
    assert "needs a GPU with CUDA" in capsys.readouterr().err


def test_a_side_that_fails_is_named_with_the_end_of_what_it_said(capsys):
    job = gpu.cases("qwen-0.5b")["qwen-0.5b-group"]
    place = {"date": "2026-01-01", "machine": "one", "commit": "abc"}
    case = {"job": job.__dict__, "trl-1.12": {"about": place, "rates": {}, "failed": "OutOfMemoryError: 40 GiB"}}
    gpu.print_tables({"qwen-0.5b-group": case})
    assert "| trl-1.12 | failed: OutOfMemoryError: 40 GiB |" in capsys.readouterr().out


def test_proximo_takes_a_step_of_a_qwen_shaped_job_in_bf16(tmp_path):
    from side_proximo import make_trainer

    make_models(tmp_path, TINY, regime="random", stop_probability=1 / 4)
    job = Job(
        models=str(tmp_path),
        size="tiny-qwen",
        regime="random",
        precision="bf16",
        num_prompts=4,
        prompt_tokens=8,
        new_tokens=10,
        epochs=1,
        minibatch=2,
    )
    trainer, prompts = make_trainer(job)
    outcome = trainer.run_step(prompts=prompts)
    lengths = [len(scored.response.token_ids) for scored in outcome.experience.scored]
    assert len(lengths) == 4
    assert min(lengths) < 10
    found = gpu.row(
        job, [dict.fromkeys(PHASES, 1.0) | {"lengths": lengths}], bytes_per_second=1e9, flops_per_second=1e9
    )
    assert found[-1] == sum(lengths)
