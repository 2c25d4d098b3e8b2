"""A bridge that runs inside the Python installation of verifiers, whose packages do not fit beside those of Proximo.

It plays episodes of verifiers for runs.

`python verifiers_bridge.py SETTINGS`: SETTINGS is JSON with `env` (the section of an EnvConfig), `num_tasks`, `socket`,
`tokenizer` (a folder) and `template_variables`. It serves the socket. Each connection sends one line of JSON, an
episode to play, and gets one line: `reward` and `info`, or `fault`. A connection that closes ends its episode. Imports
nothing of Proximo.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY_VARIABLE = "PROXIMO_API_KEY"


class Bridge:
    """One environment of verifiers with its first tasks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.env = load_environment(resolve_env_config(settings["env"]))
        self.tasks = list(itertools.islice(self.env.taskset, settings["num_tasks"]))
        if len(self.tasks) < settings["num_tasks"]:
            wanted = f"environment.num_rows is {settings['num_tasks']}"
            raise SystemExit(f"the taskset has {len(self.tasks)} tasks, and {wanted}: set it to at most that")

    async def serve(self) -> None:
        """Answer connections until the process ends."""
        async with self.env.serving():
            server = await asyncio.start_unix_server(self.answer, self.settings["socket"])
            async with server:
                await server.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Play what one connection asks for, unless it closes before."""
        asked = json.loads(await reader.readline())
        played = asyncio.ensure_future(self.play(asked))
        closed = asyncio.ensure_future(reader.read())
        await asyncio.wait((played, closed), return_when=asyncio.FIRST_COMPLETED)
        if played.done():
            writer.write(json.dumps(played.result()).encode() + b"\n")
            await writer.drain()
        else:
            played.cancel()
            await asyncio.wait((played,))
        closed.cancel()
        writer.close()

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The reward of an episode, or why it has none."""
        os.environ[KEY_VARIABLE] = asked["api_key"]
        client = vf.TrainClientConfig(
            base_url=asked["url"], api_key_var=KEY_VARIABLE, renderer_model_name=self.settings["tokenizer"]
        )
        sampling = vf.SamplingConfig(chat_template_kwargs=self.settings["template_variables"] or None)
        context = ModelContext(model="policy", client=client, sampling=sampling)
        task = self.tasks[asked["task"]]
        (slot,) = self.env.slots(task)
        numbers = itertools.count()

        def minted(trace: vf.Trace) -> None:
            # The client sends the id of a trace with every call: the server finds the trajectory by it. One client
            # serves all trajectories, since verifiers keeps a client for each address that it was given.
            if trace.agent.trainable:
                trace.id = f"{asked['trajectory']}.{next(numbers)}"

        episode = await self.env.run_slot(slot, context, on_trace=minted)
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            return {"fault": f"{errors[0].type}: {errors[0].message}" if errors else "it did not end well"}
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        named = [(name, each and each.score) for trace in trained for name, each in trace.rewards.items()]
        named += [pair for trace in trained for pair in trace.metrics.items()]
        return {"reward": sum(trace.reward for trace in trained), "info": dict(named)}


if __name__ == "__main__":
    asyncio.run(Bridge(json.loads(sys.argv[1])).serve())
