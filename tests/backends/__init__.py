import pytest

pytest.register_assert_rewrite("backends.suite", "norm.oracle")
