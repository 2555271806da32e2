"""The environment of programs of others: no account, no token and no proxy of the user's."""

import re
from collections.abc import Mapping

INHERITED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "CC", "CXX"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_OFFLINE"),
    *("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"),
}
INHERITED_FAMILIES = re.compile(
    r"(LC|VLLM|CUDA|NVIDIA|NCCL|GLOO|UCX|CCL|ROCM|ROCR|HIP|HSA|ZE|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|"
    r"TORCHINDUCTOR|PYTORCH|TRITON|FLASHINFER|NUMBA)_\w+"
)
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)")  # e.g. VLLM_API_KEY


def environment_without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program of others inherits: what it runs by, and no secret."""
    return {
        name: value
        for name, value in environ.items()
        if name in INHERITED or (INHERITED_FAMILIES.fullmatch(name) and not SECRET.search(name))
    }
