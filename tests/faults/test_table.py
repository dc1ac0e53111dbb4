"""docs/evidence/reliability.md shows the results of `make faults`, and every fault in it has a test."""

import json
import re
from pathlib import Path

from tests.benchmarks import load_benchmark

faults = load_benchmark("faults")


def test_the_page_shows_the_results():
    rows = json.loads(faults.RESULTS.read_text(encoding="utf-8"))
    match = faults.TABLE.search(faults.PAGE.read_text(encoding="utf-8"))
    assert match and match[0] == faults.table(rows)


def test_the_results_are_of_full_size_and_of_faults_that_are_tested():
    rows = json.loads(faults.RESULTS.read_text(encoding="utf-8"))
    assert {row["size"] for row in rows} <= {"full"}
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tested = {int(number) for number in re.findall(r"def test_fault_(\d\d)_", sources)}
    assert {row["fault"] for row in rows} == tested == faults.FAULTS.keys()


def test_rows_of_a_fault_that_was_tested_again_are_replaced():
    before = [{"fault": 9, "what": "cuts", "n": 1}, {"fault": 2, "what": "a"}, {"fault": 2, "what": "b"}]
    merged = faults.merge(before, [{"fault": 2, "what": "c"}, {"fault": 2, "what": "c", "n": 1234}])
    assert merged == [{"fault": 2, "what": "c", "n": 1234}, {"fault": 9, "what": "cuts", "n": 1}]
    assert "c: 1,234 n |" in faults.table(merged)
