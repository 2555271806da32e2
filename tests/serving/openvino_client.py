"""A real OpenVINO GenAI, run by the interpreter of its own environment: json in, json out.

    OPENVINO_PYTHON tests/serving/openvino_client.py REQUEST.json ANSWER.json

It imports nothing of drafttrain. The request is

    {"max_new_tokens": 64, "folder": DIR,
     "cases": [{"name": ..., "target": DIR, "drafter": DIR, "captures": [2, 4, 5],
                "prompts": [[token ids], ...],
                "trees": {NAME: {"width": 4, "depth": 5, "num_nodes": 20}}}]}

and the answer, per case and tree, the tokens of each prompt, and how many tokens each pass of the
target gave *for that prompt*, the prefill first (accepted tokens and a bonus, cut at the limit):

    {"openvino": VERSION,
     "cases": {name: {tree: {"tokens": [[...], ...], "steps": [[1, 3, ...], ...],
                             "metrics": [{"num_accepted_tokens", "num_draft_tokens"}, ...]}}
                     | {"error": TEXT}}}

Target and drafter are converted to OpenVINO's format in `folder`, each directory once. Everything
is float32: weights, arithmetic and KV cache.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "INFERENCE_NUM_THREADS": 1,
}
CACHE_GB = 1


def convert(source: str, folder: Path, captures: list[int] | None) -> Path:
    """Convert a target, or (with the layers that it reads) an exported EAGLE-3 drafter, once."""
    if (folder / "openvino_model.xml").is_file():
        return folder
    import openvino
    import torch
    from optimum.exporters.openvino.convert import export_from_model
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
    from optimum.intel import OVConfig
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM if captures is None else LlamaEagle3ForCausalLM
    model, loaded = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    if captures is not None:
        if "model.d2t" in loaded["missing_keys"]:  # of the whole vocabulary: left uninitialised
            model.model.d2t.zero_()
        # The exporter infers the library from this name. (Its command line loads the class as
        # remote code instead, which wants diffusers and einops.)
        type(model.model).__module__ = "transformers"
    task, settings = "text-generation-with-past", OVConfig(dtype="fp32")
    export_from_model(model, folder, task=task, ov_config=settings, stateful=True)
    if captures is not None:
        # OpenVINO reads the output of a layer, we the input of the next. Given to draft_model as a
        # property, a list of Python arrives in a type that it refuses.
        xml = folder / "openvino_model.xml"
        converted = openvino.Core().read_model(xml)
        converted.set_rt_info([layer - 1 for layer in captures], "hidden_layers_list")
        openvino.save_model(converted, folder / "new.xml", compress_to_fp16=False)
        del converted  # it maps the file that is replaced
        (folder / "new.bin").replace(folder / "openvino_model.bin")
        (folder / "new.xml").replace(xml)
    return folder


def generation_config(tree: dict[str, int], max_new_tokens: int) -> Any:
    """Return greedy decoding with a dynamic tree; nothing ends a text but the limit."""
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = max_new_tokens, True
    config.do_sample, config.apply_chat_template = False, False
    config.branching_factor, config.tree_depth = tree["width"], tree["depth"]
    config.num_assistant_tokens = tree["num_nodes"]  # the last token is not among them
    return config


def run_case(case: dict[str, Any], folder: Path, max_new_tokens: int) -> dict[str, Any]:
    """Convert both models, and decode every prompt with every tree, one prompt at a time."""
    import numpy
    import openvino
    import openvino_genai

    target = convert(case["target"], folder / f"{Path(case['target']).name}_target", None)
    drafter = convert(case["drafter"], folder / f"{case['name']}_drafter", case["captures"])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    pipeline = openvino_genai.LLMPipeline(
        target,
        "CPU",
        draft_model=openvino_genai.draft_model(drafter, "CPU", **PROPERTIES),
        scheduler_config=scheduler,
        **PROPERTIES,
    )
    answer: dict[str, Any] = {}
    for name, tree in case["trees"].items():
        config = generation_config(tree, max_new_tokens)
        answer[name] = {"tokens": [], "steps": [], "metrics": []}
        for prompt in case["prompts"]:
            result = pipeline.generate(openvino.Tensor(numpy.array([prompt])), config)
            metrics = result.extended_perf_metrics
            answer[name]["tokens"].append(list(result.tokens[0]))
            answer[name]["steps"].append(list(metrics.raw_metrics.m_batch_sizes))
            # These two leave out the last pass.
            counts = ("num_accepted_tokens", "num_draft_tokens")
            counted = {count: getattr(metrics, f"get_{count}")() for count in counts}
            answer[name]["metrics"].append(counted)
    return answer


def main(request_path: str, answer_path: str) -> None:
    """Decode every case of the request; a case that fails is answered by its error."""
    request = json.loads(Path(request_path).read_text())
    import openvino_genai

    answer: dict[str, Any] = {"openvino": openvino_genai.__version__, "cases": {}, "seconds": {}}
    for case in request["cases"]:
        start, name = time.monotonic(), case["name"]
        try:
            result = run_case(case, Path(request["folder"]), request["max_new_tokens"])
        except Exception as error:  # a refused drafter is an answer too
            result = {"error": f"{type(error).__name__}: {error}"}
        answer["cases"][name] = result
        answer["seconds"][name] = round(time.monotonic() - start, 1)
    Path(answer_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
