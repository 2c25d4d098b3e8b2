"""A table of what users get wrong, and the message that each gets. Imports no torch and no pytest.

A row is one command line in a folder of its own. Rows of other areas (data, models, run folders) are appended here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from recipe_files import DPO, KTO, PIPELINE, PPO, REWARD, SFT

RUN = {"run/.proximo-run": "", "run/metrics.jsonl": '{"step": 1}\n'}
SERVED = "reward: [{kind: function, function: 'nowhere:f'}]\n"
SERVED_FILE = {"r.yaml": SERVED}
STAGE_ALONE = {"r.yaml": "reward: [{kind: model, path: '@reward'}]"}
MODEL = {"model/config.json": "{}"}
SFT_MODEL = {"model/sft/config.json": "{}"}
STF = ("no folder model/stf", "did you mean model/sft?")


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One command line, the files that lie around it, and pieces of its message."""

    name: str
    argv: tuple[str, ...]
    pieces: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)


def _recipe(
    name: str, text: str | bytes, *pieces: str, kind: str = "ppo", files: Mapping[str, str | bytes] | None = None
) -> Mistake:
    """A recipe that is wrong in itself."""
    return Mistake(name=name, argv=(kind, "r.yaml"), pieces=pieces, files={"r.yaml": text, **(files or {})})


def _override(
    name: str, override: str, *pieces: str, kind: str = "ppo", files: Mapping[str, str | bytes] | None = None
) -> Mistake:
    """A good recipe with one override that is wrong."""
    text = {"ppo": PPO, "sft": SFT, "reward": REWARD, "dpo": DPO, "kto": KTO, "pipeline": PIPELINE}[kind]
    return Mistake(name=name, argv=(kind, "r.yaml", override), pieces=pieces, files={"r.yaml": text, **(files or {})})


def _use(name: str, argv: str, *pieces: str, files: Mapping[str, str | bytes] | None = None) -> Mistake:
    """A command used wrongly."""
    return Mistake(name=name, argv=tuple(argv.split()), pieces=pieces, files=files or {})


def _adapter(**changes: object) -> dict[str, str]:
    """The files of a folder `d` with an adapter of peft."""
    return {"d/adapter_config.json": json.dumps({"peft_type": "LORA"} | changes)}


def _saved_run(name: str) -> dict[str, str]:
    """The files of a run in which something was recorded, by path."""
    return {f"{name}/.proximo-run": "", f"{name}/metrics.jsonl": '{"step": 1}\n'}


RECIPES = (
    _recipe("unknown key", PPO.replace("num_steps", "num_stps"), "r.yaml, line 13", "did you mean ppo.num_steps?"),
    _recipe("key given twice", PPO + "model: {}\n", "line 14", "model is given twice, first on line 3"),
    _recipe("two mistakes", PPO.replace("10", "ten") + "x: 1\n", "2 mistakes", "line 13", "line 14"),
    _recipe(
        "aliases that multiply",
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghijklmnop")),
        "its aliases make 27 values into 1.23e+16, and 100,000 are the most",
    ),
    _recipe(
        "merges that multiply",
        "a: &a {x: 1}\n" + "".join(f"{b}: &{b}\n  <<: [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvw")),
        "its aliases make",
    ),
    _recipe("empty file", "", "r.yaml is empty"),
    _recipe("list instead of keys", "- run\n", "not a mapping"),
    _recipe("not UTF-8", b"run: {folder: Z\xfcr}\n", "not UTF-8", "byte 16"),
    _recipe("recipe of another command", SFT, "a recipe for `proximo sft`, not for `proximo ppo`"),
    _use("no such recipe file", "ppo nowhere.yaml", "no recipe file nowhere.yaml"),
    _use("no such shipped recipe", "ppo grpo-functon", "grpo-function", "pythia-1b-tldr"),
    _use("folder as recipe", "ppo folder.yaml", "cannot be read", files={"folder.yaml/x": ""}),
    _override("file for a folder of tokens", "run.token_cache=r.yaml", "run.token_cache", "r.yaml is a file"),
    _override(
        "tokenizer folder without one", "tokenizer.path=d", "tokenizer.path", "holds no tokenizer", files={"d/x": ""}
    ),
    _override(
        "second bound of a weight that is bounded",
        "ppo.policy_loss.objective={kind: cispo, dual_clip: 3}",
        "dual_clip is for kind ppo, and this is of kind cispo",
    ),
    _override(
        "texts that are not there",
        "ptx_data={sources: [{path: none.txt}]}",
        "no file none.txt",
        files={"r.yaml": PPO + "  ptx: {coefficient: 1}\n"},
    ),
    _override("reward of two words", "reward.0.name=my reward", "reward.0.name", "have the form", "'my reward'"),
    _override("file without a class", "environment.path=a.py", "form file.py:Name or package.module:Name, got 'a.py'"),
    _override("function by file", "reward=[{kind: function, function: 'rew.py:f'}]", "write rew:f, and start in its"),
    _override("stage left out that never ran", "sft=null", "@sft is left out", "runs/x/sft", kind="pipeline"),
    _override("no pull to the reference", "dpo.beta=0", "dpo.beta", "greater than 0, got 0", kind="dpo"),
    _override("reference of DPO that is not there", "reference.path=./none", "no folder ./none", kind="dpo"),
    _recipe("recipe of DPO for another command", DPO, "a recipe for `proximo dpo`, not for `proximo ppo`"),
    _override(
        "steps of KTO without another answer",
        "kto.examples_per_step=1",
        "equal to 2, got 1",
        kind="kto",
    ),
)
OVERRIDES = (
    _override("sink of no known kind", "run.sinks=[{kind: comet}]", "wandb, function", "got 'comet'"),
    _override("out of range", "run.seed=-1", "greater than or equal to 0, got -1"),
    _override("dashes", "--ppo.num_steps=3", "No such option", "proximo ppo --help"),
    _override("option that is not there", "--dryrun", "No such option", "--dry-run", "proximo ppo --help"),
    _override("secret in an address", "reward.0.url=http://me:pass@host/x?key=1", "reward.0.url=http://***@host/x?***"),
)
INPUTS = (
    _override("data file that is not there", "data.sources.0.path=none.jsonl", "there is no file none.jsonl"),
    _override("data folder as a file", "data.sources.0={path: d, format: json}", "is a folder", files={"d/x": ""}),
    _override("model folder that is nearly there", "model.path=model/stf", *STF, files=SFT_MODEL),
    _override("model in a folder of another name", "model.path=modle/sft", "did you mean model/sft?", files=SFT_MODEL),
    _override("name that is none of the Hub", "model.path=own--er/x", "no folder own--er/x"),
    _override(
        "data that is nearly there", "data.sources.0.path=d/b.jsonl", "did you mean d/a.jsonl?", files={"d/a.jsonl": ""}
    ),
    _override("data of an unknown ending", "data.sources.0.path=a.dat", "a.dat", "set format", files={"a.dat": "{}"}),
    _override(
        "folder of data files", "data.sources.0.path=d", "save_to_disk", "name the files", files={"d/a.jsonl": ""}
    ),
    _override("model folder that is not there", "model.path=./none", "model.path", "no folder ./none"),
    _override("adapter of another kind", "model.path=d", "of the kind IA3; only LoRA", files=_adapter(peft_type="IA3")),
    _override(
        "adapter that depends on the tokens",
        "model.path=d",
        "with alora_invocation_tokens, which cannot be added into the weights",
        files=_adapter(alora_invocation_tokens=[3]),
    ),
    _override(
        "adapter whose base is gone",
        "model.path=d",
        "the adapter in d was trained on models/bsae",
        "did you mean models/base?",
        files={**_adapter(base_model_name_or_path="models/bsae"), "models/base/config.json": "{}"},
    ),
    _override("adapter without a base", "model.path=d", "does not name its base model", files=_adapter()),
    _override(
        "adapter beside whole weights",
        "model.path=d",
        "holds an adapter (adapter_config.json) and whole weights (model.safetensors)",
        files={**_adapter(), "d/model.safetensors": ""},
    ),
    _override(
        "model that reads pictures",
        "model.path=d",
        "d reads more than text (gemma3, with vision_config)",
        "docs/faq.md",
        files={"d/config.json": '{"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": {}}'},
    ),
    _override("folder without a model", "model.path=d", "holds no model", "config.json", files={"d/x": ""}),
    _override("run instead of a model", "model.path=run", "proximo export run OUT", files=RUN),
    _override("file instead of a model", "reward.0.path=f", "f is a file", files={"f": ""}),
    _override("package of a sink that is missing", "run.sinks=[{kind: wandb}]", "pip install 'proximo[wandb]'"),
    _override(
        "sink's function that is not there",
        "run.sinks=[{kind: function, function: 'nowhere:f'}]",
        "run.sinks.0.function",
        "no module nowhere",
    ),
    _override("module that is not there", "gold={kind: function, function: 'nowhere:f'}", "no module nowhere"),
    _override(
        "function that is not there",
        "gold={kind: function, function: 'mine:scor'}",
        "mine.py defines no scor",
        files={"mine.py": "import torch\ndef score(): ...\n"},
    ),
    _override(
        "token that is not there",
        "reward=[{kind: remote, url: 'http://verifiers', token_env: PROXIMO_NO_SUCH_TOKEN}]",
        "reward.0.token_env",
        "PROXIMO_NO_SUCH_TOKEN is not set",
    ),
    _override(
        "two inputs", "model.path=./a", "2 inputs", "./a", "./b", files={"r.yaml": PPO.replace("owner/r", "./b/r")}
    ),
)
HELD = {"r.yaml": PPO, **_saved_run("runs/x")}
COMMANDS = (
    _use("unknown command", "pp", "No such command 'pp'", "'ppo'"),
    _use("no recipe", "ppo", "Missing argument 'RECIPE'"),
    _use("unknown option", "ppo ppo --bogus", "No such option: --bogus"),
    _use("resume in another way", "ppo ppo --resume=later", "'later'", "'auto'"),
    _use("resume and overwrite", "ppo ppo --resume --overwrite", "choose one"),
    _use("run in a folder that holds one", "ppo r.yaml", "already holds a run", "--resume=auto or --over", files=HELD),
    _use("resume with a blank", "ppo r.yaml --resume auto", "an override is key.sub=value", files={"r.yaml": PPO}),
    _use("resume of nothing", "ppo r.yaml --resume", "no run to resume in runs/x", files={"r.yaml": PPO}),
    _use("dry run of the same", "ppo r.yaml --resume --dry-run", "no run to resume in runs/x", files={"r.yaml": PPO}),
    _use("resume without a checkpoint", "ppo r.yaml --resume", "has no checkpoint yet", files=HELD),
    _use("run in a folder of something else", "ppo r.yaml", "holds no run", files={"r.yaml": PPO, "runs/x/a": ""}),
    _use("run below a file", "ppo r.yaml", "runs is a file", "no folder runs/x", files={"r.yaml": PPO, "runs": ""}),
    _use(
        "pipeline in folders that hold runs",
        "pipeline r.yaml",
        "runs/x/reward already holds a run",
        files={"r.yaml": PIPELINE, **_saved_run("runs/x/reward")},
    ),
    _use(
        "start from the run that is replaced",
        "ppo r.yaml model.path=runs/x/checkpoints/step-000001/policy --overwrite",
        "in the folder runs/x that --overwrite would move aside",
        "run.folder",
        files={**HELD}
        | {f"runs/x/checkpoints/step-000001/policy/{name}.json": "{}" for name in ("config", "tokenizer")},
    ),
    _use("kind that there is none of", "config schema sftt", "sft, reward, prm, dpo, kto, ppo or pipeline"),
    _use("recipe of no clear kind", "config show r.yaml", "--kind", files={"r.yaml": "run: {}\n"}),
    _use("plan of nothing", "plan nowhere.yaml", "no recipe file nowhere.yaml"),
    _use("copy over a file", "recipes copy ppo mine.yaml", "mine.yaml exists", files={"mine.yaml": "x: 1\n"}),
    _use("copy into nowhere", "recipes copy ppo no/such/folder/mine.yaml", "cannot be written"),
    _use("serving of nothing", "serve-reward nowhere.yaml", "no recipe file nowhere.yaml"),
    _use("serving of a recipe without rewards", "serve-reward r.yaml", "has no reward sources", files={"r.yaml": SFT}),
    _use("serving of no sources", "serve-reward r.yaml", "reward must be a list", files={"r.yaml": "reward:\n"}),
    _use(
        "serving of an unknown key", "serve-reward r.yaml", "line 2", "rewrd", files={"r.yaml": SERVED + "rewrd: 1\n"}
    ),
    _use("serving of a function that is not there", "serve-reward r.yaml", "no module nowhere", files=SERVED_FILE),
    _use("serving of a stage alone", "serve-reward r.yaml", "has a meaning in a pipeline only", files=STAGE_ALONE),
    _use(
        "serving to everyone", "serve-reward r.yaml --host 0.0.0.0", "--token-env", "--without-token", files=SERVED_FILE
    ),
    _use("serving with and without a token", "serve-reward r.yaml --token-env A --without-token", "choose one"),
    _use(
        "serving with a token that is not there",
        "serve-reward r.yaml --token-env NO_SUCH_TOKEN",
        "NO_SUCH_TOKEN is not",
    ),
    _use("serving at no port", "serve-reward r.yaml --port 70000", "--port"),
    _use("report of nothing", "report runs/none", "no run folder runs/none"),
    _use("report of an empty run", "report run", "has no line yet", files={**RUN, "run/metrics.jsonl": ""}),
    _use(
        "report of junk",
        "report run",
        "run/metrics.jsonl",
        "none of its 2 lines",
        files={**RUN, "run/metrics.jsonl": "junk\n[1]\n"},
    ),
    _use(
        "report of a pipeline with junk",
        "report p",
        "p/sft/metrics.jsonl",
        files={"p/sft/.proximo-run": "", "p/sft/metrics.jsonl": "junk\n"},
    ),
    _use("report of another folder", "report d", "holds no run", files={"d/x": ""}),
    _use("export of nothing", "export runs/none out", "no run folder runs/none"),
    _use("export below a file", "export run notes.txt/x", "notes.txt is a file", files={**RUN, "notes.txt": "1"}),
    _use("export over a folder", "export run out", "out exists and is left as it is", files={**RUN, "out/x": "1"}),
    _use("export in other numbers", "export run out --dtype float16", "'float32', 'bfloat16'", files=RUN),
    _use("push to no name", "export run out --push a/b/c", "push needs a name on the Hub", "'a/b/c'", files=RUN),
    _use("private without a push", "export run out --private", "private is for a model that push creates", files=RUN),
    _use("evaluation of nothing", "evaluate runs/none", "no run folder runs/none"),
    _use("generation from another folder", "generate d x", "d holds no run", files={"d/x": ""}),
    _use("generation from a file", "generate a.jsonl x", "a.jsonl is a file", files={"a.jsonl": ""}),
    _use("comparison of a run with itself", "report run run", "given twice", files=RUN),
    _use("report over a file", "report run --out notes.txt", "left as it is", files={**RUN, "notes.txt": "1"}),
    _use("report to a name that is too long", f"report run --out {'x' * 300}", "cannot be read", files=RUN),
    _use("report over a folder", "report run --out d", "d is a folder: give a file", files={**RUN, "d/x": ""}),
    _use(
        "following several runs",
        "report runs/x runs/y --follow",
        "--follow is for one run",
        files={"runs/x/log.txt": "", "runs/y/log.txt": ""},
    ),
    _use("report of a file", "report a.jsonl", "no run folder a.jsonl", files={"a.jsonl": ""}),
    _use("generation without a prompt", "generate model", "no prompt", files=MODEL),
    _use("generation from a folder that is nearly there", "generate model/stf x", *STF, files=SFT_MODEL),
    _use("chat with a folder that is nearly there", "chat model/stf", *STF, files=SFT_MODEL),
    _use("score by a folder that is nearly there", "generate model/sft x --reward model/stf", *STF, files=SFT_MODEL),
    _use("score by no function", "generate model x --reward nowhere:f", "no module nowhere", files=MODEL),
    _use("responses to nowhere", "generate model x --output no/a.jsonl", "there is no folder no", files=MODEL),
    _use(
        "responses where nothing can be written",
        f"generate model x --output {'a' * 300}",
        "cannot be written (File name too long)",
        files=MODEL,
    ),
    _use("chat with tokens below one", "chat model --max-new-tokens 0", "--max-new-tokens", files=MODEL),
    _use("no samples", "generate model x --num-samples 0", "--num-samples", files=MODEL),
)
MISTAKES = (*RECIPES, *OVERRIDES, *INPUTS, *COMMANDS)
