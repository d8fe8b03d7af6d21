"""Captures: the file format of an update that left a client. It knows names, shapes and bytes, and
no model."""

from gradleak.captures.capture_file import (
    Capture,
    read_capture,
    subtract_states,
    write_capture,
)
from gradleak.captures.folders import (
    ClientMessage,
    Federation,
    FolderIndex,
    hash_state,
    holds_captures,
    index_folder,
    is_of_captures,
    name_capture,
    survey_federation,
    survey_folder,
    write_reply,
    write_sent,
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
    "ClientMessage",
    "Federation",
    "FolderIndex",
    "Granted",
    "Layout",
    "ModelFacts",
    "ProtocolFacts",
    "TensorFacts",
    "hash_state",
    "holds_captures",
    "index_folder",
    "is_capture",
    "is_of_captures",
    "match_names",
    "name_capture",
    "read_capture",
    "read_header",
    "read_layout",
    "subtract_states",
    "survey_federation",
    "survey_folder",
    "write_capture",
    "write_reply",
    "write_sent",
]
