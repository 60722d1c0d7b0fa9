"""Codes are a promise: every one that the bundle can give stands in the documentation, and none that it cannot."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fedbicross.bundle import REPLY, UPLOAD
from imports import modules_of

PAGE = (Path(__file__).parents[2] / "docs" / "bundle-format.md").read_text(encoding="utf-8")


def codes(error: str) -> set[str]:
    """Literal first arguments of every error of this class in the package."""
    found = set()
    for file in modules_of("fedbicross.bundle"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == error:
                found |= {leaf.value for leaf in ast.walk(node.args[0]) if isinstance(leaf, ast.Constant)}
    return {str(code) for code in found}


def test_every_code_is_documented_and_exists() -> None:
    section = PAGE[PAGE.index("## Codes") : PAGE.index("## The audit log")]
    table, after = section.split("A list of keys", 1)
    documented = set(
        re.findall(r"`([a-z_]+)`", "".join(line.split(" | ")[0] for line in table.splitlines() if "|" in line))
    )
    helpers = {"header", "no_manifest", "tensor_list", "task_"}  # given through a variable, or with a field's name
    methods = {"answers", "encoder_mismatch", "feature_width"}  # raised where methods look at networks and features
    fields = {"task_classes", "task_image_size", "task_channels", "task_preprocessing"}
    assert documented == (codes("UploadError") | helpers | methods | fields) - {"task_"}
    assert set(re.findall(r"`([a-z]+_[a-z]+)`", after)) == codes("ConfigError")


def test_limits_are_documented() -> None:
    assert f"| tensors | {UPLOAD.max_tensors:,} | {REPLY.max_tensors:,} |" in PAGE
    assert f"| header | {UPLOAD.max_header >> 20} MiB | {REPLY.max_header >> 20} MiB |" in PAGE
    assert f"| file | {UPLOAD.max_bytes >> 30} GiB | {REPLY.max_bytes >> 30} GiB |" in PAGE
    assert f"| length of a tensor's name | {UPLOAD.max_name_length} | {REPLY.max_name_length} |" in PAGE
    assert f"| dimensions of a tensor | {UPLOAD.max_rank} | {REPLY.max_rank} |" in PAGE
    assert f"| nesting of header and manifest | {UPLOAD.max_depth} | {REPLY.max_depth} |" in PAGE
    assert UPLOAD.max_elements == REPLY.max_elements == 2**30
    assert all(dtype in PAGE for dtype in UPLOAD.dtypes)
