"""The server under load and attack: the tests are those of tests/serve, which `make faults` runs and counts here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import is_full

SERVE = Path(__file__).parent.parent / "serve"
RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
LIMITS = {
    "test_security.py": [
        "test_a_body_above_the_limit_is_refused_announced_or_not",
        "test_slow_requests_lose_their_connection_in_time",
        "test_bare_uvicorn_waits_for_ever",
        "test_a_second_request_on_a_connection_has_its_own_time",
        "test_too_many_connections_are_refused_and_the_server_recovers",
        "test_what_would_block_a_run_for_minutes_is_refused_with_the_limit_named",
    ],
    "test_batching.py": [
        "test_short_requests_do_not_wait_for_a_long_text",
        "test_a_long_request_ends_at_the_time_limit",
    ],
}
HOSTILE = {
    "test_schemathesis.py": [
        "test_no_request_is_answered_by_a_server_error",
        "test_a_server_error_would_be_noticed",
    ],
    "test_security.py": [
        "test_host_and_origin_must_be_our_own_on_every_method",
        "test_only_the_page_and_health_are_public",
        "test_errors_have_one_form_and_name_no_path",
        "test_answers_carry_security_headers",
    ],
    "test_files.py": [
        "test_a_table_that_cannot_be_read_is_one_clear_message",
        "test_columns_are_kept_and_formulas_disarmed",
    ],
    "test_page.py": ["test_hostile_texts_labels_and_names_run_nothing", "test_nothing_inserts_markup"],
}
GONE = {
    "test_batching.py": ["test_a_client_that_leaves_frees_its_rows"],
    "test_server.py": ["test_nothing_is_lost_by_kill_9_and_running_requests_finish_at_sigterm"],
    "test_security.py": ["test_ctrl_c_stops_the_server_and_the_time_to_finish_is_limited"],
}


def passed(tests: dict[str, list[str]]) -> int:
    """How many of these tests pass; in `make test` they run in their own folder, and here only have to exist."""
    for file, names in tests.items():
        source = (SERVE / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in source for name in names), file
    if not is_full():
        pytest.skip("tests/serve runs them")
    words = [f"{SERVE / file}::{name}" for file, names in tests.items() for name in names]
    command = [sys.executable, "-m", "pytest", "--verbosity=0", "-p", "no:cacheprovider", *words]
    process = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r"(\d+) passed", process.stdout)
    assert process.returncode == 0 and match, process.stdout
    return int(match[1])


def test_fault_26_requests_too_large_too_slow_or_too_many(record):
    record(26, "large bodies, slow sockets, many connections, long texts", tests_passed=passed(LIMITS))


def test_fault_27_hostile_requests(record):
    record(27, "requests made from the API's schema, hostile hosts, tables and texts", tests_passed=passed(HOSTILE))


def test_fault_28_clients_and_servers_that_go_away(record):
    count = passed(GONE)
    soak = json.loads((RESULTS / "serve-soak.json").read_text(encoding="utf-8"))
    assert soak["healthy"] and set(soak["statuses"]) == {"200"}
    record(28, "clients that leave, kill -9, SIGTERM, Ctrl-C", tests_passed=count)
    figures = {"requests": soak["statuses"]["200"], "errors": 0, "memory_growth": f"{soak['memory_growth']:.1%}"}
    record(28, "soak, 64 clients (benchmarks/results/serve-soak.json)", minutes=round(soak["minutes"]), **figures)
