"""Files of API keys."""

import re

import pytest

from serving_core.errors import SettingsError
from serving_core.net.api_keys import MAX_FILE_BYTES, MAX_KEYS, read_api_keys

SECRET = "s3cret"


def test_names_and_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\nann@work.example  {SECRET}\n  alone\nbob\tx\n")
    assert read_api_keys(file) == {SECRET: "ann@work.example", "alone": "", "x": "bob"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has 0 API keys, it must have 1 to 1024"),
        (b"\n".join(b"%d" % number for number in range(MAX_KEYS + 1)), "has 1025 API keys, it must have 1 to 1024"),
        (f"ann {SECRET}\nann and {SECRET}\n".encode(), "line 2 of .* must be NAME KEY, or a key alone"),
        (f"a/b {SECRET}".encode(), "line 1 of .* must be NAME KEY, or a key alone"),
        (f"{SECRET}\x00".encode(), "line 1 of .* must be NAME KEY, or a key alone"),
        (f"# keys\nann {SECRET}é\n".encode(), "line 2 of .* must be NAME KEY, or a key alone"),
        (f"ann {SECRET}\n{SECRET}".encode(), "line 2 of .* has a key that another line has"),
        (b"\xff", "is not UTF-8 text"),
        (b"a" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path, content, problem):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=problem) as caught:
        read_api_keys(file)
    assert SECRET not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingsError, match=f"{re.escape(str(tmp_path / 'no'))}.* cannot be read: No such file"):
        read_api_keys(tmp_path / "no")
