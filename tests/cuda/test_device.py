"""The kernels of CUDA without a device: what they compute, in Triton's interpreter, and that they compile."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import proximo

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make test does on Linux")
HERE = Path(__file__).parent
SOURCES = Path(proximo.__file__).parents[1]
BENCHMARKS = HERE.parents[1] / "benchmarks"
NUM_MODELS = 4


def run(program: Path, *arguments: Path) -> str:
    """A process of its own: Triton chooses its interpreter when it is imported."""
    paths = os.pathsep.join([str(SOURCES), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", program, *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    file = tmp_path_factory.mktemp("device") / "found.pt"
    run(HERE / "device_in_process.py", file)
    return torch.load(file)


@pytest.mark.parametrize("number", range(1, NUM_MODELS))
def test_a_model_trains_and_samples_as_its_modules_do(saved: Mapping[str, Any], number: int) -> None:
    found, expected = saved["found"][number], saved["expected"][number]
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["gradients"], expected["gradients"], atol=1e-5, rtol=1e-4)
    assert found["tokens"] == expected["tokens"]
    torch.testing.assert_close(torch.cat(found["sampled"]), torch.cat(expected["sampled"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["logprobs", "entropies", "gradients"])
def test_in_bf16_a_model_is_near_to_float32_as_its_modules_are(saved: Mapping[str, Any], name: str) -> None:
    """Which roundings fall how is luck: a product in the wrong type, or a lost adapter, is ten times as far away."""
    found, modules, exact = (saved[which][0][name] for which in ("found", "expected", "exact"))
    assert (found - exact).norm() <= 4 * (modules - exact).norm()


def test_in_bf16_a_model_decodes_with_joint_matrices_and_an_adapter(saved: Mapping[str, Any]) -> None:
    """Compared where rounding has tipped no draw."""
    assert saved["num_joint"] == 2 * 2  # layers; queries, keys and values, then gate and up
    each = [saved[which][0] for which in ("found", "expected", "exact")]
    same = [i for i, drawn in enumerate(zip(*(one["tokens"] for one in each), strict=True)) if len(set(drawn)) == 1]
    assert same
    found, modules, exact = (torch.cat([one["sampled"][i] for i in same]) for one in each)
    assert (found - exact).norm() <= 4 * (modules - exact).norm()


def test_kernels_agree_with_torch_also_if_a_rollout_asks_first(saved: Mapping[str, Any]) -> None:
    assert saved["agree"]


def test_a_kernel_that_is_wrong_is_named_and_none_is_used(saved: Mapping[str, Any]) -> None:
    agree, (said,) = saved["wrong"]
    assert not agree
    assert said.startswith("the fused kernels of layers are not used on cpu: the error of scale in torch.")


def test_attention_over_the_cache_is_that_of_the_definition(saved: Mapping[str, Any]) -> None:
    """Also where NaN lies beyond the end of each row."""
    assert len(saved["attention"]) == 9
    assert max(saved["attention"]) < 2e-6


def test_a_pass_takes_ten_launches_a_layer_and_ten_more_and_places_its_prompts_in_one_a_layer(
    saved: Mapping[str, Any],
) -> None:
    """Modules take 31 a layer (test_fake_cuda.py), and place a prompt by two copies for each of its rows.

    Beside the layers there are the embedding, rotary angles, the last norm and the head. A row with more than one chunk
    takes another launch a layer, which adds the chunks up.
    """
    two, three = (saved["launches"][num_layers] for num_layers in (2, 3))
    layer = three["pass"] - two["pass"]
    assert layer == {"norm": 2, "addmm": 1, "rotate": 1, "_put": 1, "_attend": 1, "mm": 3, "activate": 1}
    rest = {"embedding": 1, "arange": 1, "mul": 3, "cat": 1, "cos": 1, "sin": 1, "norm": 1, "mm": 1}
    assert two["pass"] - layer - layer == rest
    assert (two["placing"], three["placing"]) == ({"_put": 2}, {"_put": 3})


def test_a_draw_takes_three_launches(saved: Mapping[str, Any]) -> None:
    drawn = saved["launches"][3]
    assert drawn["draw"] == {"_weigh": 1, "_race": 1, "_decide": 1}
    assert drawn["plain draw"].total() > 40


def test_a_layer_is_trained_in_less_than_half_the_launches_of_its_modules(saved: Mapping[str, Any]) -> None:
    fused, modules = (saved["training"][name] for name in ("fused", "modules"))
    own = {"norm": 2, "norm_backward": 2, "scale": 2, "rotate": 3, "activate": 1, "activate_backward": 1}
    assert {name: fused[name] for name in own} == own
    assert fused.total() <= 64
    assert modules.total() > 2 * fused.total()


def test_a_pass_reads_the_bytes_of_the_floor(saved: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second, of two rows: all weights once, and 8 keys and values of each row."""
    for folder in (BENCHMARKS / "peers", BENCHMARKS):
        monkeypatch.syspath_prepend(folder)
    from floor import Lengths
    from gpu.floors import decode_bytes
    from work import Size

    size = Size(vocabulary=64, width=16, layers=3, heads=2, mlp=32)
    two, one = (decode_bytes(size, Lengths(prompts=[7, 7], responses=[count] * 2)) for count in (2, 1))
    assert sum(saved["bytes"][name] for name in ("mm", "addmm", "_attend")) == two - one


def test_the_sampler_has_the_hash_bits_of_the_definition(saved: Mapping[str, Any]) -> None:
    found, expected = saved["bits"]
    assert found.equal(expected)


def test_a_target_outside_the_vocabulary_has_no_log_prob(saved: Mapping[str, Any]) -> None:
    assert saved["outside"].isnan().tolist() == [True, False, True]


def test_every_kernel_compiles_for_a_device(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses, such as an annotation that it does not know."""
    assert len(run(HERE / "compile_kernels.py").split()) == 14
