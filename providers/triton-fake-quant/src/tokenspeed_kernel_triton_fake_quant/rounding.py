# SPDX-License-Identifier: Apache-2.0
"""Rounding to the formats' grids, as Triton functions: to nearest, ties to even, NaN kept, subnormals kept.

Each adds a number so large that the sum has no bits below the grid's step: the sum is rounded to the grid, and taking
the number away again is exact. That needs no FP8 unit, no table, and no conversion to an integer.
"""

import triton
import triton.language as tl

__all__ = [
    "DIVIDES_BY_FMA",
    "clamp",
    "divide",
    "divisor_parts",
    "is_divisor_plain",
    "kept_narrow",
    "larger",
    "largest",
    "lower",
    "quotient_by_parts",
    "round_to_e2m1",
    "round_to_e4m3",
    "round_to_integer",
    "signed_like",
    "to_float32",
    "unsigned_zero",
    "with_sign_of",
]

DIVIDES_BY_FMA = tl.constexpr(not triton.knobs.runtime.interpret)
"""False in Triton's interpreter, whose fused multiply-add rounds twice."""


@triton.jit
def clamp(value, lowest, highest):
    """Return values within the bounds, and NaN."""
    return tl.clamp(value, lowest, highest, propagate_nan=tl.PropagateNan.ALL)  # by default NaN becomes a bound


@triton.jit
def largest(x, AXIS: tl.constexpr, FINITE_MAX: tl.constexpr):
    """Return the largest magnitude along an axis: NaN is ignored, Inf counts as the largest finite value."""
    # These maxima drop NaN; if all are NaN, the second one gives zero.
    return tl.minimum(tl.maximum(tl.max(tl.abs(x), axis=AXIS), 0.0), FINITE_MAX)


@triton.jit
def larger(so_far, x):
    """Return the larger of ``so_far`` and the magnitude of ``x``, in the dtype of ``x``; NaN is ignored."""
    # Two at a time, which Triton would convert to float32 one by one.
    if DIVIDES_BY_FMA and x.dtype == tl.bfloat16:
        so_far = tl.inline_asm_elementwise(
            "{ .reg .b32 magnitude; and.b32 magnitude, $2, 0x7FFF7FFF; max.bf16x2 $0, $1, magnitude; }",
            "=r,r,r", [so_far, x], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif DIVIDES_BY_FMA and x.dtype == tl.float16:
        so_far = tl.inline_asm_elementwise(
            "{ .reg .b32 magnitude; and.b32 magnitude, $2, 0x7FFF7FFF; max.f16x2 $0, $1, magnitude; }",
            "=r,r,r", [so_far, x], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        so_far = tl.maximum(so_far.to(tl.float32), tl.abs(x.to(tl.float32))).to(x.dtype)
    return so_far


@triton.jit
def lower(value, bound):
    """Return what is lower, and NaN."""
    return tl.minimum(value, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def kept_narrow(x):
    """Return 16-bit values as they are, such that the compiler takes them for others.

    Else it keeps what they were converted to, in twice the registers, until they are converted again.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=True, pack=2)


@triton.jit
def round_to_integer(value):
    """Round float32 within +-2**21 to an integer. A zero is +0."""
    return (value + 12582912.0) - 12582912.0  # 1.5 * 2**23


@triton.jit
def unsigned_zero(value, DTYPE: tl.constexpr):
    """Convert float32 values, multiples of at least 1e-12, to ``DTYPE``; a zero becomes +0."""
    value = (value + 0.0).to(DTYPE)
    if value.dtype == tl.float16:  # the one in which a negative value may become zero when it is rounded
        value = tl.where(value == 0.0, 0.0, value)
    return value


@triton.jit
def with_sign_of(magnitude, x):
    """Return magnitudes with the signs of ``x``, those of zeros too."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def signed_like(magnitude, x):
    """Convert float32 magnitudes to the dtype of ``x``, with its signs, those of zeros too."""
    if DIVIDES_BY_FMA and x.dtype != tl.float32:
        value = tl.inline_asm_elementwise(  # magnitude | (x & sign), two at a time
            "lop3.b32 $0, $1, $2, 0x80008000, 0xF8;",
            "=r,r,r", [magnitude.to(x.dtype), x], x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        value = with_sign_of(magnitude, x.to(tl.float32)).to(x.dtype)
    return value


@triton.jit
def to_float32(x):
    """Return values as float32."""
    if DIVIDES_BY_FMA and x.dtype == tl.bfloat16:
        # One instruction each; Triton moves the upper one of two down before it moves it up.
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&r,=&r,r", [x], tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def round_to_e4m3(magnitude):
    """Round magnitudes that are hardly beyond 448."""
    # The step is 2**(exponent - 3), and 2**-9 among the subnormals; 20 more is what has no bits below it.
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    power = exponent.to(tl.float32, bitcast=True)
    return tl.fma(power, -(2.0**20), tl.fma(power, 2.0**20, magnitude))


@triton.jit
def round_to_e2m1(magnitude):
    """Round magnitudes that are hardly beyond 6."""
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    power = exponent.to(tl.float32, bitcast=True)
    return tl.fma(power, -(2.0**22), tl.fma(power, 2.0**22, magnitude))


@triton.jit
def divide(x, divisor, lowest, highest):
    """Return ``x / divisor`` as IEEE division rounds it, for a divisor that is 1e-12 or more.

    A quotient beyond the bounds is replaced by the bound, or a neighbour of it.

    The reciprocal, correctly rounded, is corrected twice by the exact remainder: the first makes the quotient one of
    the two nearest numbers, which is what the second needs to give the nearest (Markstein's theorem). That is half the
    price of ``div_rn``, which looks out for overflow and underflow at each element: here large divisors are scaled down
    with what they divide, and what is small enough to lose bits then is far below any step.
    """
    if DIVIDES_BY_FMA:
        factor = tl.where(divisor > 2.0**60, 2.0**-64, 1.0)
        divisor = divisor * factor
        reciprocal = tl.div_rn(1.0, divisor)
        x = clamp(x * factor, divisor * lowest, divisor * highest)
        first = x * reciprocal
        second = tl.fma(tl.fma(-divisor, first, x), reciprocal, first)
        return tl.fma(tl.fma(-divisor, second, x), reciprocal, second)
    else:  # noqa: RET505 -- what follows a return is compiled too
        return clamp(tl.div_rn(x, divisor), lowest, highest)


@triton.jit
def divisor_parts(divisor):
    """Return two numbers whose sum is the reciprocal of ``divisor`` to 2**-45, for one within 2**-90 and 2**90."""
    # One instruction: within one unit, and the divisor is in the range in which it need not look out for any other.
    high = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, is_pure=True, pack=1)
    error = tl.fma(-divisor, high, 1.0)
    return high, tl.fma(error, error, error) * high


@triton.jit
def is_divisor_plain(divisor, BITS: tl.constexpr):
    """Return whether :func:`quotient_by_parts` rounds to a format as IEEE division and then rounding does.

    Where a format's ties are numbers of ``24 - BITS`` bits, that holds for all divisors but those whose last ``BITS``
    bits are close to zero without being zero. The product of parts is the quotient to 2**-44, so it can be rounded to
    the other neighbour of a tie only if it is that close to the middle between two float32. With x = X * 2**i and
    divisor = D * 2**j in 24 bits and such a middle (2 * M + 1) * 2**k, where M is the tie, x - divisor * middle is a
    multiple of its last bit: not zero, at most 32 of them for a quotient so close, and equal to D, or -D, in its last
    ``BITS`` bits, because all else there are zeros.
    """
    bits = divisor.to(tl.int32, bitcast=True)
    last = (bits + 64) & ((1 << BITS) - 1)
    return (divisor > 2.0**-90) & (divisor < 2.0**90) & ((last > 128) | (last == 64))


@triton.jit
def quotient_by_parts(magnitude, high, low):
    """Return the quotient by a divisor of those :func:`divisor_parts`: see :func:`is_divisor_plain`."""
    return tl.fma(magnitude, high, magnitude * low)
