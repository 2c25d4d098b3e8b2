"""`proximo engine`: installs vLLM and serves models with it, through `rollout/vllm/`."""

import os
from typing import Annotated, Literal

import typer

from proximo.errors import UserError

app = typer.Typer(help="Install vLLM next to Proximo, and serve models for PPO with it.", no_args_is_help=True)
Folder = Annotated[
    str | None,
    typer.Option("--folder", metavar="FOLDER", help="Folder of vLLM's environment.  [default: in the user's cache]"),
]


@app.command("install")
def install(
    *,
    folder: Folder = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="The device of vLLM; auto takes what this machine has.")
    ] = "auto",
) -> None:
    """Install vLLM into a separate environment; it takes minutes, and 4 to 12 GB of disk.

    \b
    proximo engine install
    proximo engine install --device cpu --folder ~/vllm

    vLLM and Proximo need different versions of libraries, so they never share an environment. A recipe uses it with

    \b
    engine: {kind: vllm}

    docs/vllm.md.
    """
    from proximo.rollout.vllm.process import environment_folder
    from proximo.rollout.vllm.process import install as make

    if device == "auto":
        from proximo.models.precision.placement import resolve_device

        device = "cuda" if resolve_device("auto").type == "cuda" else "cpu"
    made = environment_folder(folder)
    make(made, device=device, say=typer.echo)
    typer.echo(f"vLLM for {device} is in {made}")


@app.command("serve")
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub name of the policy that PPO starts from.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Further arguments of vLLM.")
    ] = None,
    *,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. It has no token for weights: no public network.")] = (
        "127.0.0.1"
    ),
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type to compute in.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, help="ppo.rollout.temperature of the run.")] = 1.0,
    sampling_mask: Annotated[
        bool, typer.Option("--sampling-mask", help="The run has ppo.rollout.top_k or top_p. Needs a GPU.")
    ] = False,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Rank of model.lora, if there is one.")] = None,
    folder: Folder = None,
) -> None:
    """Serve a model for PPO with vLLM until Ctrl-C, for a recipe with `engine.addresses`.

    \b
    proximo engine serve Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16
    proximo engine serve ./sft-model --port 8001 -- --tensor-parallel-size 2

    The run has in its recipe

    \b
    engine: {kind: vllm, addresses: ["http://localhost:8000"]}
    """
    from proximo.models.precision.placement import resolve_device
    from proximo.rollout.vllm.process import ServerSpec, interpreter

    on_cpu = resolve_device("auto").type == "cpu"
    if sampling_mask and on_cpu:
        raise UserError("--sampling-mask needs a GPU, and there is none here: vLLM has no sampling masks on a CPU")
    spec = ServerSpec(
        python=interpreter(folder),
        model=model,
        dtype=dtype,
        raw_logprobs=temperature == 1 and not sampling_mask,
        sampling_mask=sampling_mask,
        lora_rank=lora_rank,
        on_cpu=on_cpu,
        arguments=arguments or (),
    )
    os.execve(spec.python, spec.command("--host", host, "--port", str(port)), spec.variables())
