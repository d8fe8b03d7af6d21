"""Captures: the file format of an update that left a client. It knows names, shapes and bytes, and
no model."""

from gradleak.captures.capture_file import (
    Capture,
    read_capture,
    subtract_states,
    write_capture,
)
from gradleak.captures.folder_index import (
    FolderIndex,
    index_folder,
    name_capture,
    survey_folder,
)
from gradleak.captures.header import (
    FORMAT,
    CaptureError,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
)
from gradleak.captures.layout import Layout, TensorFacts, is_capture, read_header, read_layout
from gradleak.captures.tensor_names import match_names

__all__ = [
    "FORMAT",
    "Capture",
    "CaptureError",
    "CaptureHeader",
    "FolderIndex",
    "Granted",
    "Layout",
    "ModelFacts",
    "ProtocolFacts",
    "TensorFacts",
    "index_folder",
    "is_capture",
    "match_names",
    "name_capture",
    "read_capture",
    "read_header",
    "read_layout",
    "subtract_states",
    "survey_folder",
    "write_capture",
]
