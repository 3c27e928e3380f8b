"""The table of call forms and the tests belong together."""

from __future__ import annotations

import pytest

from tests.clients.table import FORMS, WORKS, Form
from tests.identify import ROOT, _tests_of, missing

CLIENTS = ("vLLM", "SGLang", "AITER", "ATOM", "Primus-Turbo", "Megatron", "DeepEP", "benchmark", "RTP-LLM")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.client}: {form.form}"[:60])
def test_every_form_has_tests_that_exist(form: Form):
    assert form.tests and missing(form.test_ids) == []


def test_every_test_is_in_the_table():
    named = {test_id for form in FORMS for test_id in form.test_ids}
    files = [path for path in (ROOT / "tests" / "clients").glob("test_*.py") if "import_surface" not in path.name]
    written = {
        f"tests/clients/{file.name}::{name}"
        for file in files
        if file.name != "test_table.py"
        for name in _tests_of(f"tests/clients/{file.name}")
    }
    assert written - named == set()


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_in_the_table_and_refusals_are_explained(client: str):
    forms = [form for form in FORMS if client in form.client]
    assert forms
    document = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    for form in forms:
        assert form.outcome in document
        assert form.outcome == WORKS or "`" in form.outcome, "a refusal names its exception"
