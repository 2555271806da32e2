"""Exports for llama.cpp: what its converter would drop or misread is refused by name.

The converter itself runs in the serving suite; here stand scripts that do what one line of it does.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import drafter_config
from conftest import character_tokenizer
from test_write import CARD, VOCAB, config_of, drafter_of, spec
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.causal_lm_layout import CausalLMLayout
from drafttrain.drafters.small_lm import SmallLM
from drafttrain.formats.write.export import Exported, convert, export_drafter

TYPES = {
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dspark": "draft-dspark",
    "eagle3": "draft-eagle3",
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


def export(
    drafter: Drafter, folder: Path, target_folder: Path | None = None, **changes: Any
) -> Exported:
    settings = config_of(**{"format": "gguf", **changes})
    return export_drafter(
        *(drafter, "/models/tiny", folder, settings, CARD), target_folder=lambda: target_folder
    )


def for_a_target(drafter: Drafter, **changes: Any) -> Drafter:
    """Return the drafter as of a target that differs so."""
    drafter.spec = dataclasses.replace(drafter.spec, **changes)
    return drafter


def untrained(family: str, **changes: Any) -> Drafter:
    """Return a new drafter with changes to its yaml."""
    return drafter_config(family, **changes).build(spec())


def language_model(**settings: Any) -> Drafter:
    """Return a language model of these settings as a drafter, as drafter.path makes one."""
    shape: dict[str, Any]
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(**shape, **settings)
    drafter = untrained("small_lm")
    assert isinstance(drafter, SmallLM)
    drafter.from_serving(
        config.to_diff_dict(), AutoModelForCausalLM.from_config(config).state_dict()
    )
    return drafter


def converter(folder: Path, code: str) -> str:
    """Write a checkout whose converter is this code; return the folder."""
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(f"import sys\nfrom pathlib import Path\n{code}\n")
    return str(folder)


@pytest.mark.parametrize("family", TYPES)
def test_without_a_checkout_the_command_converts_first(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = export(drafter_of(family), folder, num_speculative_tokens=4)
    assert list(done.commands) == ["llama.cpp"]
    convert, serve = done.commands["llama.cpp"].split(" && ")
    assert convert == (
        f"python LLAMA_CPP/convert_hf_to_gguf.py {folder} --target-model-dir /models/tiny "
        f"--outtype bf16 --outfile {folder}/drafter.gguf"
    )
    assert serve == (
        f"llama-server -m TARGET.gguf -md {folder}/drafter.gguf --spec-type {TYPES[family]} "
        "--spec-draft-n-max 4"
    )
    card = (folder / "README.md").read_text()
    assert "--target-model-dir TARGET" in card
    assert str(tmp_path) not in card


def test_a_language_model_is_converted_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = config_of(format="gguf")
    given = untrained("small_lm", hidden_size=32), "/models/tiny", folder, settings, CARD
    done = export_drafter(*given, character_tokenizer)
    assert (folder / "tokenizer.json").is_file()
    assert done.commands["llama.cpp"] == (
        f"python LLAMA_CPP/convert_hf_to_gguf.py {folder} --outtype bf16 "
        f"--outfile {folder}/drafter.gguf && llama-server -m TARGET.gguf -md {folder}/drafter.gguf "
        "--spec-type draft-simple --spec-draft-n-max 3"
    )


def test_a_checkout_converts_what_was_written(tmp_path: Path) -> None:
    """It reads the whole directory; what it is given is what would have been printed."""
    code = "found = sorted(path.name for path in Path(sys.argv[1]).iterdir())\n"
    code += "Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text(' '.join(found))"
    place = converter(tmp_path / "llama.cpp", code)
    done = export(drafter_of("dflash"), tmp_path / "out", tmp_path, converter=place)
    found = (tmp_path / "out" / "drafter.gguf").read_text()
    assert found == "README.md config.json model.safetensors"
    assert "drafter.gguf" in done.sizes
    assert done.commands["llama.cpp"].startswith("llama-server ")
    export(drafter_of("dspark"), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "drafter.gguf").exists()


def test_the_converter_gets_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code = "import os\nassert 'HF_TOKEN' not in os.environ\n"
    code += "Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('GGUF')"
    place = tmp_path / "drafter"
    layout = CausalLMLayout()
    place.mkdir()
    convert(layout, converter(tmp_path / "llama.cpp", code), place, place, "a", torch.float32)
    assert (place / "drafter.gguf").read_text() == "GGUF"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized - update it')", "a hash"),
        ("import no_such_module", "install that module beside drafttrain, or leave export.conv"),
        ("raise ValueError('Can not map tensor')", "got: ValueError: Can not map tensor; leave"),
        ("sys.exit(3)", "got: exit status 3"),
        ("", "got: exit status 0"),  # it wrote nothing
    ],
)
def test_a_converter_that_fails_is_told_in_a_line_and_nothing_stays(
    code: str, message: str, tmp_path: Path
) -> None:
    place = converter(tmp_path / "llama.cpp", code)
    with pytest.raises(ValueError, match=message) as error:
        export(drafter_of("dflash"), tmp_path / "out", tmp_path, converter=place)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["llama.cpp"]


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (lambda: drafter_of("medusa"), "takes no Medusa"),
        (lambda: drafter_of("eagle"), "takes no EAGLE-1"),
        (lambda: drafter_of("p_eagle"), "takes no P-EAGLE"),
        (
            lambda: drafter_of("eagle3_1"),
            "drafter.fc_norm and drafter.norm_output must be false in training, got true: .*=vllm",
        ),
        (
            lambda: untrained("eagle3", norm_before_fc=True, norm_output=True),
            "drafter.norm_output must be false in training, got true: llama.cpp .* has no such",
        ),
        (lambda: drafter_of("eagle3", layers=[2, 4, 8]), "reads the inputs of three layers"),
        (lambda: drafter_of("eagle3", layers=[2, 4]), "reads the inputs of three layers"),
        (lambda: untrained("dflash", layers=[2, 8]), "8 is the output of the last one"),
        (lambda: untrained("dflash", rope_scaling=LLAMA3), "rotary scaling of kind llama3"),
        (lambda: untrained("eagle3", rope_scaling=YARN), "rotary scaling of kind yarn"),
        (lambda: language_model(model_type="mistral"), "not tried with mistral models as drafters"),
        (
            lambda: language_model(model_type="llama", rope_parameters=YARN),
            "rotary scaling of kind yarn in llama models",
        ),
        (
            lambda: language_model(model_type="qwen3", rope_parameters=LLAMA3),
            "rotary scaling of kind llama3 in qwen3 models",
        ),
        (
            lambda: for_a_target(drafter_of("dflash"), architecture="qwen2"),
            "was not tried with qwen2 targets",
        ),
    ],
)
def test_what_llama_cpp_would_misread_is_refused_by_name(
    drafter: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"export.format=gguf cannot hold .* drafter: .*{reason}"):
        export(drafter(), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"converter": "/nowhere"}, "export.converter must be a checkout of llama.cpp, with conv"),
        ({"converter": "/x", "format": "vllm"}, "must come with export.format=gguf, got vllm"),
        ({"dtype": "fp8"}, "must come with export.format=vllm, got gguf"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export(drafter_of("dflash"), tmp_path / "out", tmp_path, **changes)


def test_a_target_without_files_has_no_tokenizer_to_convert(tmp_path: Path) -> None:
    place = converter(tmp_path / "llama.cpp", "")
    with pytest.raises(ValueError, match=r"model must be a directory or a .* tokenizer"):
        export(drafter_of("dflash"), tmp_path / "out", None, converter=place)
