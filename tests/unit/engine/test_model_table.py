from tests.model_table import PAGE, page


def test_the_page_has_the_table_that_tests_make():
    assert PAGE.read_text() == page(), "python -m tests.model_table writes it"
