"""`make serve`: the shop with its worker and the admin, and their end."""

from __future__ import annotations

import re
import signal

import pytest

from ..worker.support import until
from .shop import Answer, Browser, Shop, free_port, opens


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_web_and_worker_and_leaves_no_process(shop: Shop, number: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN and number == signal.SIGHUP:
        pytest.skip("run under nohup, which the shop respects")
    port = free_port()
    served = shop.start("serve.py", PORT=str(port))
    browser = Browser(port)
    opens(browser, served)
    assert log_in(browser, served.output()).status == 302
    assert look_at_a_job(shop, browser)
    served.send(number)
    assert served.ends() == 0, served.output()
    assert "Stopping: finishing what is under way." in served.output()
    assert shop.alive() == []


def log_in(browser: Browser, printed: str) -> Answer:
    """Enter the admin with the account that was printed."""
    found = re.search(r"Sign in as +(\S+) +with password +(\S+)", printed)
    assert found is not None, printed
    return browser.submit("/admin/login/", username=found[1], password=found[2])


def look_at_a_job(shop: Shop, browser: Browser) -> bool:
    """Place an order, and find its confirmed job in the admin."""
    assert browser.submit("/", customer="Ada", product="1", quantity="1").status == 302
    until(lambda: shop.value("SELECT confirmations FROM shop_order") == 1, "the confirmation")
    jobs = browser.get("/admin/django_durable_jobs/job/")
    assert jobs.status == 200
    assert "shop.confirm_order" in jobs.text
    links = set(re.findall(r"/admin/django_durable_jobs/job/\d+/change/", jobs.text))
    assert len(links) == 2
    return all(browser.get(link).status == 200 for link in links)
