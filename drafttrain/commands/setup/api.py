"""drafttrain from Python: the target, a drafter, a text and a report, as the commands make them.

Settings are keyword arguments, named and checked as on the command line, where
`python -m drafttrain evaluate --help model`, `--help drafter` and `--help eval` list them.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drafttrain.commands.setup.evaluation import Loaded, meet, set_up
from drafttrain.commands.setup.talk import Talk, check_alone
from drafttrain.commands.setup.target_and_drafter import (
    GivenDrafter,
    drafter_to_evaluate,
    load_target_to_decode,
)
from drafttrain.config.compose import compose, typed
from drafttrain.config.groups import choices, own_choices
from drafttrain.config.overrides import UsageError, spelled
from drafttrain.config.sections import EvaluateConfig
from drafttrain.core.tokenizer import text_of
from drafttrain.core.types import Decoded
from drafttrain.data.records import Message, Unusable, message_of
from drafttrain.decode.stream import Stream
from drafttrain.drafters.base import LOOKUP, Drafter
from drafttrain.evaluation.config import FROM_TUNE, EvalConfig
from drafttrain.evaluation.evaluate import evaluate_drafter
from drafttrain.report.pages import write_report
from drafttrain.report.results import Report
from drafttrain.runtime.hardware import DecodeChoice, choose_device, dtype_name
from drafttrain.runtime.lock import hold
from drafttrain.runtime.run_folder import CONFIG, is_repo, provenance
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.model import Target

Messages = Sequence[Mapping[str, str]]  # {"role", "content"}, as in a chat


@dataclass(frozen=True)
class Generated(Decoded):
    """An answer: its text, its tokens (the end of the turn too), and what they cost.

    message: its turn, for the messages of the next question (see `Stream.message`).
    """

    text: str
    message: dict[str, str]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target pass that verified a draft, bonus counted; None without a draft."""
        return self.stats.trimmed.acceptance_length


def load_target(
    model: str | Path = "tiny",
    *,
    device: str = "auto",
    dtype: str = "auto",
    config_dir: str | Path | None = None,
    **settings: object,
) -> Target:
    """Load a target to decode with, and set the threads of this process as commands do.

    model: a name in conf/model, or a directory with a model of Transformers. dtype: float32,
    bfloat16, or auto (measured on a CPU). config_dir: yaml of your own, laid out like conf/.
    settings: keys of `model`, such as revision or max_positions.
    """
    with own_choices(config_dir):
        known = choices("model")
        if str(model) in known:
            chosen = f"model={model}"
        elif Path(model).expanduser().is_dir():
            chosen = f"model.path={spelled(model)}"
        else:
            raise UsageError(
                "model must be the directory of a model or one of "
                f"{', '.join(sorted(known))}, got {shown(model)}; a model of the Hub is "
                "load_target('llama8b', repo='owner/name')"
            )
        hardware = {"hardware.device": device, "hardware.dtype": dtype}
        config = _composed(f"drafter={LOOKUP}", chosen, **hardware, **_keys("model", settings))
    where = torch.device(choose_device(config.hardware))
    return load_target_to_decode(config.model, config.hardware, where)[0]


def load_drafter(
    drafter: str | Path, target: Target, *, config_dir: str | Path | None = None, **settings: object
) -> Drafter:
    """Load a drafter for a target, in float32 if the target is in float32.

    drafter: the folder of a run (its best checkpoint is taken), a directory or a repository of the
    Hub with a drafter that others trained, or the name in conf/drafter of one that needs no
    training. config_dir: yaml of your own, laid out like conf/, where the run's drafter is your
    own. settings: keys of `drafter`.
    """
    folder = Path(drafter).expanduser()
    with own_choices(config_dir):
        if (folder / CONFIG).is_file():
            chosen = f"run.dir={spelled(folder)}"
        elif folder.is_dir() or is_repo(str(drafter)):
            chosen = f"drafter.path={spelled(folder)}"
        elif str(drafter) in choices("drafter"):
            chosen = f"drafter={drafter}"
        else:
            raise UsageError(
                "drafter must be the folder of a run, the directory of a drafter, or a name in "
                f"conf/drafter, got {shown(drafter)}, which is none; train one: "
                "python -m drafttrain train run.name=demo, then load_drafter('outputs/demo', ...)"
            )
        config = _composed(chosen, **_keys("drafter", settings))
        given = drafter_to_evaluate(folder, config.drafter, _config_of(target))
    for line in given.lines:
        console.print(line)
    meet(given, target, target.device)
    return given.drafter


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt: str | Messages,
    *,
    seed: int = 0,
    **settings: object,
) -> Stream:
    """Answer as `generate` does, piece by piece: `for piece in stream(...)`, or `async for`.

    Nothing is decoded before the first piece is asked for.
    """
    config = _composed(f"drafter={LOOKUP}", **_decoding(seed, settings))
    check_alone(config.eval)
    messages = _messages(prompt)
    _check_depth(config.eval)
    if drafter is not None:
        _check_pair(target, drafter)
    talk = Talk(target, drafter, config.eval, config.data.text_format, seed, cut=False)
    return talk.stream(messages)


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: str | Messages,
    *,
    seed: int = 0,
    **settings: object,
) -> Generated:
    """Answer a text or the messages of a chat; drafter None decodes token by token.

    settings: keys of `eval` that say how to decode (depth, policy, temperature, top_p, rule,
    stop_strings, max_new_tokens), and template, template_kwargs, template_date. template="none"
    takes the text as it is, for a target without a chat template.
    """
    answer = stream(target, drafter, prompt, seed=seed, **settings).rest()
    assert answer.decoded is not None, "it has ended"
    text = text_of(target.tokenizer, answer.decoded.tokens, skip_special_tokens=True)
    return Generated(answer.decoded.tokens, answer.decoded.stats, text, answer.message)


def evaluate(
    target: Target,
    drafter: Drafter,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    **settings: object,
) -> Report:
    """Measure a drafter as it is now in the whole speculative loop, beside plain decoding.

    folder: gets report.json, report.md, report.html and the measurements, from which a stopped
    evaluation resumes; None keeps no file. settings: keys of `eval` (prompts, prompts_per_task,
    depth, certify), and template, template_kwargs, template_date.
    """
    if settings.get("engine", "drafttrain") != "drafttrain":
        raise UsageError(
            f"engine must be drafttrain here, got {shown(settings['engine'])}; a run is measured "
            "in vLLM by python -m drafttrain evaluate run.dir=DIR eval.engine=vllm"
        )
    _check_pair(target, drafter)
    config = _composed(f"drafter={LOOKUP}", **_decoding(seed, settings))
    device, dtype = str(target.device), dtype_name(target.dtype)
    _check_depth(config.eval)
    config = replace(
        config,
        model=_config_of(target),
        drafter=drafter.config,
        hardware=replace(config.hardware, device=device, dtype=dtype),
    )
    mine = copy.deepcopy(drafter).to(target.device, torch.float32).eval()
    weights = hashlib.sha256()
    for name, value in mine.state_dict().items():
        weights.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        weights.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    origin = f"{drafter.config.name} from Python, weights {weights.hexdigest()[:16]}"
    threads = torch.get_num_threads()
    choice = DecodeChoice(target.dtype, threads, f"{dtype} with {threads} threads")
    trained_on = drafter.spec
    given = GivenDrafter(mine, None, origin, (), trained_on.fingerprint, trained_on.name)
    setup = set_up(config, loaded=Loaded(given, target, choice, target.device, config.eval))
    record = provenance([]) | {"command": "drafttrain.evaluate(target, drafter)"}
    if folder is None:
        with TemporaryDirectory() as removed:
            return evaluate_drafter(setup, Path(removed), record)[0]
    place = Path(folder)
    with hold(place, "folder", "evaluate", console.print):
        report, _, journals = evaluate_drafter(setup, place, record)
        write_report(report, place)
        for journal in journals:
            journal.finish()
    return report


def _composed(*chosen: str, **settings: object) -> EvaluateConfig:
    told = [f"{key}={spelled(value)}" for key, value in settings.items()]
    return typed(compose("evaluate", [*chosen, *told]), EvaluateConfig)


def _check_depth(how: EvalConfig) -> None:
    """Refuse what `tune` chose for a run, whose folder is known to commands alone."""
    made = how.policy in FROM_TUNE
    if made or how.depth == AUTO:
        wanted = f"policy={how.policy}" if made else f"depth={how.depth}"
        raise UsageError(
            f"{wanted} takes what `tune` chose for a run, and is for `evaluate`; give "
            "depth=NUMBER, or policy='static_tree' and tree=NODES (tuned.json holds them)"
        )


def _keys(section: str, settings: Mapping[str, object]) -> dict[str, object]:
    return {f"{section}.{key}": value for key, value in settings.items()}


def _decoding(seed: int, settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by the keys that they have on the command line."""
    section = lambda key: "data" if key.startswith("template") else "eval"  # noqa: E731
    return {"run.seed": seed} | {f"{section(key)}.{key}": v for key, v in settings.items()}


def _messages(prompt: str | Messages) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    try:
        messages = [message_of(dict(turn), place) for place, turn in enumerate(prompt, 1)]
        if not messages or messages[-1].role != "user":
            raise Unusable("no turn" if not messages else f"the {messages[-1].role}'s at the end")
    except (Unusable, TypeError, ValueError) as error:
        detail = f" ({error.detail})" if isinstance(error, Unusable) and error.detail else ""
        raise ValueError(
            'prompt must be text, or messages such as [{"role": "user", "content": "Hello"}] of '
            f"which the last is a user's, got {shown(error)}{detail}"
        ) from error
    return messages


def _config_of(target: Target) -> Any:
    assert target.config is not None, "a target comes from load_target"
    return target.config


def _check_pair(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter that was made for a target of another shape."""
    for key in ("vocab_size", "hidden_size", "num_layers"):
        own, other = getattr(drafter.spec, key), getattr(target.spec, key)
        if own != other:
            raise ValueError(
                f"drafter must be one for {target.spec.name}, whose {key} is {other:,}, got one "
                f"for {drafter.spec.name}, where it is {own:,}; load it with "
                "load_drafter(..., target)"
            )
