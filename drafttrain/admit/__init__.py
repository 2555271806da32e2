"""Drafters that others trained: recognised, checked against the target, and made to draft.

A table of what is admitted, and of what engines read differently: `layouts` and `medusa`.
"""

from drafttrain.admit.admit import Admitted, AdmittedConfig, admit
from drafttrain.admit.folder import Folder, open_folder
from drafttrain.admit.recognise import Recognised, recognise

__all__ = [
    "Admitted",
    "AdmittedConfig",
    "Folder",
    "Recognised",
    "admit",
    "open_folder",
    "recognise",
]
