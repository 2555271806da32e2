"""Shared by all tests: offline, one thread, and a tiny random target that downloads nothing."""

import os

# Set before torch and Transformers are imported: both read them once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)

import copy
import functools
import gc
import signal
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Tests take from tests/support, and from each other.
sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]

import jaxtyping
import pytest
import torch
import yaml
from shape_checker import unchecked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from drafttrain.target.model import Target

torch.set_num_threads(1)

# Tests send these, and nohup or a script's `&` has them ignored in all that they start.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

# Shapes and types of every call in the package, as signatures state them: a third of the time of
# the tests, so where it is asked for, as CI does. It does not survive torch.compile.
if os.environ.get("CHECK_SHAPES") == "1":
    jaxtyping.install_import_hook("drafttrain", "shape_checker.check")

TINY_VOCAB_SIZE = 97
SPECIAL_TOKENS = ["<|pad|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# The embedded target's template (drafttrain/assets/tiny), marks of the assistant's text included.
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


# What imports and collection make stays to the end: it is not looked through for garbage again and
# again, neither while it grows nor in every collection after (half a second each).
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    own = os.environ.get("CONFIG_DIR")
    if own and not any(Path(own).glob("drafter/*.yaml")):
        raise pytest.UsageError(f"CONFIG_DIR must name a folder with drafter/NAME.yaml, got {own}")
    if record := os.environ.get("RECORD_DURATIONS"):
        from record_durations import Durations

        config.pluginmanager.register(Durations(Path(record).resolve()))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Undo what a command that ran in this process set: a fork waits for threads it does not have.

    (libgomp's team is the parent's; a child that asks for as many threads waits for them forever.)
    """
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """Check no types of calls: this test gives the package objects that stand in for its own."""
    with unchecked(True):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_choices() -> Iterator[None]:
    """Take the choices of CONFIG_DIR too, as a command takes those of --config-dir."""
    from drafttrain.config.groups import own_choices

    with own_choices(os.environ.get("CONFIG_DIR")):
        yield


@pytest.fixture(scope="session", autouse=True)
def _light_commands() -> Iterator[None]:
    """Commands in this process see one core, measure briefly, and compose and count equals once.

    They do not wait until the disk has what they wrote: no test cuts the power.

    Other workers use the other cores: threads that share one spin while they wait for each other.
    """
    import hydra
    import omegaconf.omegaconf
    from composed import ComposedOnce

    from drafttrain.commands.setup import plan
    from drafttrain.evaluation import measure
    from drafttrain.plan import accelerator, shapes
    from drafttrain.runtime import hardware

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "num_cores", lambda: 1)
        patch.setattr(hardware, "MEASURED_ROUNDS", 3)
        patch.setattr(omegaconf.omegaconf, "yaml", ParsedOnce())
        patch.setattr(hydra, "compose", ComposedOnce(hydra.compose))
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(measure, "gc", YoungGarbage())
        # Every `train` plans, and most of them plan alike.
        for module, name in (
            (accelerator, "measured_peaks"),
            (shapes, "counted"),
            (plan, "drafter_cost"),
        ):
            patch.setattr(module, name, remembered(getattr(module, name)))
        yield


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which answers arguments that it has seen as it did then.

    The arguments must be written in full by `repr`, as dataclasses are. `__wrapped__` is the
    function itself.
    """
    answers: dict[Any, Any] = {}

    @functools.wraps(function)
    def answer(*arguments: Any) -> Any:
        key = (*map(type, arguments), repr(arguments))
        if key not in answers:
            answers[key] = function(*arguments)
        return answers[key]

    return answer


class YoungGarbage:
    """The module `gc`, whose full collection, slow in a test run, looks at new objects only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self, generation: int = 2) -> int:
        return gc.collect(0)


class ParsedOnce:
    """The module `yaml`, whose `load` remembers what a text holds: conf/ is composed so often."""

    def __init__(self) -> None:
        self._parsed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(yaml, name)

    def load(self, stream: Any, Loader: Any) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        if text not in self._parsed:
            self._parsed[text] = yaml.load(text, Loader=Loader)
        return copy.deepcopy(self._parsed[text])


@pytest.fixture
def real_pictures() -> None:
    """For a test that looks at pictures, in a module that otherwise has `plain_pictures`."""


@pytest.fixture
def plain_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of reports are drawn but not written out, which takes most of a report's time."""
    if "real_pictures" in request.fixturenames:
        return
    from matplotlib.figure import Figure

    written = Figure.savefig

    def savefig(self: Figure, content: Any, *, format: str, **how: Any) -> None:
        if format != "svg":
            written(self, content, format=format, **how)
        else:
            content.write(b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"></svg>')

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def seeded() -> None:
    """Seed torch's global generator, for tests that draw random weights or tensors."""
    torch.manual_seed(0)


def character_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per character: 6 special tokens and 91 characters; any other character is '?'."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = "\n " + string.ascii_letters + string.digits + ".,?!:;'\"-+*/=()[]{}<>|_#%&$"
    words = SPECIAL_TOKENS + list(characters)
    assert len(words) == TINY_VOCAB_SIZE, len(words)
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Llama (hidden 32, vocabulary 97, float32) with tokenizer and template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_target")
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,  # wide enough that the greedy choice is never a tie
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> "Target":
    """The tiny target in float32; a module's tests share it, so none may change it."""
    from builders import model_config

    from drafttrain.target.model import load_target

    return load_target(model_config(tiny_target_dir), torch.float32, "cpu")
