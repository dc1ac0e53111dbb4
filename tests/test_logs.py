"""Log messages reach the command line, and nested work can be muted."""

import logging

from headstock.logs import messages_to, muted

logger = logging.getLogger("headstock.train.toy")


def test_info_and_warnings_are_passed_on_and_debug_is_not():
    lines: list[str] = []
    with messages_to(lines.append):
        logger.debug("detail")
        logger.info("step %d", 3)
        logger.warning("careful")
    logger.warning("after the block")
    assert lines == ["step 3", "careful"]


def test_muted_keeps_warnings_only():
    lines: list[str] = []
    with messages_to(lines.append):
        with muted():
            logger.info("nested")
            with muted():
                logger.warning("careful")
        logger.info("outer")
    assert lines == ["careful", "outer"]


def test_messages_reach_caplog(caplog):
    caplog.set_level("INFO", logger="headstock")
    logger.info("step %d", 3)
    with muted():
        logger.info("nested")
    assert caplog.messages == ["step 3"]


def test_a_library_that_configures_the_root_logger_does_not_repeat_messages(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    lines: list[str] = []
    with messages_to(lines.append):
        logging.warning("of a library")  # adds a handler to the root logger
        logger.warning("careful")
    assert lines == ["careful"]
    assert capsys.readouterr().err == "WARNING:root:of a library\n"
