# SPDX-License-Identifier: Apache-2.0
"""signature: frozen descriptions of operand formats, with stand-in dtypes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tokenspeed_kernel.signature import (
    FormatSignature,
    ScaleFormat,
    TensorFormat,
    dense_tensor_format,
    format_signature,
    format_signatures,
    tensor_format,
)

# Dtypes are stored as they come, so a str stands in for one.
F32: Any = "float32"
BF16: Any = "bfloat16"
FP8: Any = "float8"


def test_dense_format_is_the_default() -> None:
    """A plain tensor has format "dense" and no scale."""
    assert dense_tensor_format(BF16) == tensor_format("dense", BF16) == TensorFormat(BF16)
    assert TensorFormat(BF16).scale is None


def test_signature_does_not_depend_on_the_order_of_roles() -> None:
    """The same roles in another order are the same signature, with the same hash."""
    a, b = dense_tensor_format(F32), dense_tensor_format(BF16)
    assert format_signature(a=a, b=b) == format_signature(b=b, a=a)
    assert len({format_signature(a=a, b=b), format_signature(b=b, a=a)}) == 1
    assert format_signature(a=a, b=b) != format_signature(a=b, b=a)


def test_role_named_twice_is_refused() -> None:
    """One operand has one format."""
    with pytest.raises(ValueError, match=r"named once, got \['a', 'a'\]"):
        FormatSignature((("a", dense_tensor_format(F32)), ("a", dense_tensor_format(BF16))))


def test_signature_answers_by_role() -> None:
    """A role gives its format and dtype, an unknown one None."""
    signature = format_signature(x=dense_tensor_format(F32))
    assert signature.format_for("x") == dense_tensor_format(F32)
    assert signature.storage_dtype_for("x") == F32
    assert (signature.format_for("y"), signature.storage_dtype_for("y")) == (None, None)


def test_signatures_make_one_per_dtype() -> None:
    """Every role of a signature has the same dtype, and there is one signature for each."""
    actual = format_signatures(("a", "b"), "dense", [F32, BF16])
    expected = {format_signature(a=dense_tensor_format(dtype), b=dense_tensor_format(dtype)) for dtype in (F32, BF16)}
    assert actual == expected


def test_one_role_may_be_a_str() -> None:
    """A role's name alone is one role, not one per letter."""
    assert format_signatures("weight", "dense", {F32}) == {format_signature(weight=dense_tensor_format(F32))}


def test_scale_is_part_of_the_format() -> None:
    """Two scales make two formats."""
    channel, token = (ScaleFormat(F32, granularity) for granularity in ("channel", "token"))
    (signature,) = format_signatures("x", "scaled-fp8", {FP8}, scale=channel)
    assert signature == format_signature(x=tensor_format("scaled-fp8", FP8, scale=channel))
    assert signature != format_signature(x=tensor_format("scaled-fp8", FP8, scale=token))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularity": "block"}, "needs block_shape"),
        ({"granularity": "block", "block_shape": ()}, "positive sizes"),
        ({"granularity": "block", "block_shape": (1, 0)}, "positive sizes"),
        ({"granularity": "block", "block_shape": (-16,)}, "positive sizes"),
        ({"granularity": "tensor", "block_shape": (16,)}, "belongs to granularity 'block'"),
        ({"granularity": "channel", "dynamic_block_shape": True}, "belongs to granularity 'block'"),
    ],
)
def test_scale_format_is_validated(arguments: dict[str, Any], message: str) -> None:
    """A block shape goes with blocks, and with nothing else."""
    with pytest.raises(ValueError, match=message):
        ScaleFormat(F32, **arguments)


def test_block_shape_becomes_a_tuple() -> None:
    """A list of sizes is the same block shape, and hashes."""
    made = {ScaleFormat(F32, "block", [1, 128]), ScaleFormat(F32, "block", (1, 128))}  # type: ignore[arg-type]
    assert len(made) == 1


def test_dynamic_block_shape_needs_no_sizes() -> None:
    """Any block shape may be declared without naming one."""
    assert "dynamic" in str(ScaleFormat(F32, "block", dynamic_block_shape=True))


def test_texts_name_every_part() -> None:
    """The text names roles, formats, dtypes and scales."""
    scale = ScaleFormat(F32, "block", (1, 128))
    text = str(format_signature(x=tensor_format("scaled-fp8", FP8, scale=scale)))
    assert all(part in text for part in ("x=", "fp8", "float8", "block", "(1, 128)", "float32"))
    assert str(FormatSignature(())) == "none"


def test_signature_pickles() -> None:
    """A copy from another process is equal."""
    signature = format_signature(x=tensor_format("scaled-fp8", FP8, scale=ScaleFormat(F32, "tensor")))
    assert pickle.loads(pickle.dumps(signature)) == signature
