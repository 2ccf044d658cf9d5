import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from layernorm_cli.errors import UsageError
from layernorm_cli.norm.dtypes import DTYPES, dtype_of, float_dtype, numpy_dtype, output_dtype

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
BEYOND_NUMPY = FLOATS[3:]


def test_table_holds_these_dtypes():
    assert list(DTYPES) == FLOATS + OTHERS


def test_codes_are_those_of_safetensors():
    codes = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL"
    assert [dtype.code for dtype in DTYPES.values()] == codes.split()


@pytest.mark.parametrize("name", DTYPES)
def test_entry_agrees_with_numpy(name):
    dtype = DTYPES[name]
    array_dtype = numpy_dtype(dtype)
    assert dtype.name == name
    assert (array_dtype.name, array_dtype.itemsize) == (name, dtype.itemsize)
    assert array_dtype.str[0] in "<|"
    assert dtype.in_numpy == (name not in BEYOND_NUMPY)
    if dtype.in_numpy:
        assert array_dtype.kind == dtype.kind


@pytest.mark.parametrize("name", BEYOND_NUMPY)
def test_format_of_a_float_that_numpy_lacks(name):
    limits = ml_dtypes.finfo(name)
    assert (DTYPES[name].mantissa, DTYPES[name].min_exponent) == (limits.nmant, limits.minexp)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("float64", "float64"),
        ("double", "float64"),
        ("fp64", "float64"),
        ("float32", "float32"),
        ("F32", "float32"),
        ("f32", "float32"),
        ("float", "float32"),
        ("single", "float32"),
        ("Float16", "float16"),
        ("HALF", "float16"),
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e4m3", "float8_e4m3fn"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
        ("F8_E5M2", "float8_e5m2"),
    ],
)
def test_float_dtype_by_any_of_its_names(text, name):
    assert float_dtype(text) is DTYPES[name]


@pytest.mark.parametrize(
    "text", ["int32", "I32", "bool", "", "float8", "float128", "f4", " f32", "complex64"]
)
def test_other_dtypes_are_no_floats(text):
    with pytest.raises(UsageError, match=r"(?s)not a floating dtype.*float64, .*float8_e5m2") as caught:
        float_dtype(text)
    assert caught.value.where == f"dtype {text!r}"


def test_names_are_unique():
    names = [n for d in DTYPES.values() for n in {d.name.lower(), d.code.lower(), *d.aliases}]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        *((name, name) for name in FLOATS[:4]),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "bfloat16"),
        *((name, "float64") for name in OTHERS),
    ],
)
def test_output_dtype(name, output):
    assert output_dtype(DTYPES[name]) is DTYPES[output]


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_of_an_array_in_either_byte_order(name):
    dtype = numpy_dtype(DTYPES[name])
    assert dtype_of(np.zeros(2, dtype)) is DTYPES[name]
    if DTYPES[name].in_numpy:
        assert dtype_of(np.zeros(2, dtype.newbyteorder(">"))) is DTYPES[name]


@pytest.mark.parametrize(
    "dtype", ["c8", "U3", "S3", "O", "M8[s]", "m8[s]", "V2", [("a", "f4")]], ids=str
)
def test_dtypes_without_a_norm_are_refused_by_name(dtype):
    array = np.zeros(2, dtype)
    with pytest.raises(UsageError) as caught:
        dtype_of(array)
    assert caught.value.found == f"arrays of dtype {array.dtype} have no layer norm"


def test_ml_dtypes_is_imported_for_its_own_types_only():
    code = """
import sys
from layernorm_cli import layer_norm
from layernorm_cli.norm.dtypes import DTYPES, numpy_dtype

layer_norm([1, 2])
print("ml_dtypes" in sys.modules)
numpy_dtype(DTYPES["bfloat16"])
print("ml_dtypes" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
