"""What `make demo` does and proves, once Django is set up (demo.py)."""

import json
import os
import time

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Sum
from django.test import Client
from django.urls import reverse
from django_durable_jobs.models import Job

import processes
from shop import airports, services
from shop.jobs import flaky
from shop.models import (
    Airport,
    ImportedChunk,
    InboxMessage,
    Order,
    OutboxMessage,
    Payment,
    Product,
    SentMessage,
)

LIMIT_SECONDS = 300


class UnexpectedError(Exception):
    """One sentence about what is not as it should be."""


class CardDeclinedError(Exception):
    """Rolls an order back, on purpose."""


def run(log):
    print(f"Database: {connection.vendor}. The worker's log: {os.path.relpath(log)}\n")
    newest = Job.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    story = stage_everything()
    jobs = work_until_done(newest, log)
    print_jobs(jobs)
    print_proof(jobs, story)
    print("\nAll as it should be. To look around: make serve, then open the admin.")


# What is asked of the shop


def stage_everything():
    """Place orders, deliver a message twice, start the long and the flaky job."""
    orders = place_orders(5)
    lost = place_order_and_roll_back()
    message_id = deliver_twice(orders[0])
    imported = start_import()
    flaky.enqueue()
    return {"orders": orders, "lost": lost, "message_id": message_id, "import": imported}


def place_orders(number):
    products = list(Product.objects.all())
    orders = [
        services.place_order(customer=f"Customer {n}", product=products[n % 4], quantity=n + 1)
        for n in range(number)
    ]
    print(f"Placed {number} orders, each in one transaction with its job and message.")
    return orders


def place_order_and_roll_back():
    try:
        with transaction.atomic():
            order = services.place_order(
                customer="Nobody", product=Product.objects.first(), quantity=1
            )
            raise CardDeclinedError
    except CardDeclinedError:
        print("Placed one more and rolled it back.")
    return order


def deliver_twice(order):
    """Deliver one payment message twice to the real view; give its id."""
    message_id = f"demo-{order.reference}"
    body = {
        "message_id": message_id,
        "order": str(order.reference),
        "amount_cents": order.total_cents,
    }
    client = Client(headers={"X-Webhook-Secret": settings.SHOP_WEBHOOK_SECRET, "Host": "localhost"})
    url = reverse("shop:payment_received")
    codes = [
        client.post(url, json.dumps(body), content_type="application/json").status_code
        for _ in range(2)
    ]
    expect(codes == [201, 200], f"The webhook answered {codes}, not 201 and then 200.")
    print("Delivered one payment message twice to the webhook.")
    return message_id


def start_import():
    job = services.start_import()
    expect(job.newly_created, "Another import is live in this database.")
    rows = airports.count_rows(airports.find_file(""))
    print(f"Started the import of {rows:,} airports, and a job that fails twice.\n", flush=True)
    return {"job": job, "rows": rows}


# The worker


def work_until_done(newest, log):
    """Run `manage.py runjobs` until every job after `newest` has ended; give them."""
    jobs = Job.objects.filter(pk__gt=newest).order_by("pk")
    with log.open("wb") as output:
        worker = processes.start("runjobs", stdout=output, stderr=output)
        try:
            wait_for_jobs(jobs, worker)
        finally:
            worker.terminate()
            code = processes.wait(worker, 45)
    expect(code == 0, f"The worker ended with exit code {code}, not 0.")
    return list(jobs.prefetch_related("attempts"))


def wait_for_jobs(jobs, worker):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(job.is_terminal for job in jobs.all()):
        expect(worker.poll() is None, "The worker ended before its work was done.")
        expect(time.monotonic() < deadline, f"Jobs are still open after {LIMIT_SECONDS} s.")
        time.sleep(0.2)


# What came of it


def print_jobs(jobs):
    """Print a line for each handler and end; the seconds are those of its slowest job."""
    alike = {}
    for job in jobs:
        alike.setdefault((job.handler, job.status), []).append(job)
    print(f"{'handler':<24}{'status':<12}{'jobs':>5}{'attempts':>10}{'slowest':>10}")
    for (handler, status), group in sorted(alike.items()):
        attempts = sum(job.attempt_count for job in group)
        slowest = max(seconds_of(job) for job in group)
        print(f"{handler:<24}{status:<12}{len(group):>5}{attempts:>10}{slowest:>8.2f} s")
    print()


def seconds_of(job):
    """Give the time from a job's first start to its end."""
    began = min((attempt.started_at for attempt in job.attempts.all()), default=job.created_at)
    return (job.finished_at - began).total_seconds()


def print_proof(jobs, story):
    """Print each claim beside what the tables say; fail if one does not hold."""
    failed = False
    for claim, found, expected in proof(jobs, story):
        holds = found == expected
        failed = failed or not holds
        print(f"ok  {claim}: {found}" if holds else f"NO  {claim}: {found}, not {expected}")
    expect(not failed, "The tables do not hold what they should (NO above).")


def proof(jobs, story):
    """Yield (claim, what was found, what was expected), from the business tables."""
    references = [order.reference for order in story["orders"]]
    orders = Order.objects.filter(reference__in=references)
    yield "jobs that succeeded", sum(job.status == "succeeded" for job in jobs), len(jobs)
    yield (
        "orders confirmed exactly once",
        orders.filter(confirmations=1, confirmed_at__isnull=False).count(),
        len(references),
    )

    lost = str(story["lost"].reference)
    yield "rolled-back order: rows", Order.objects.filter(reference=lost).count(), 0
    yield "rolled-back order: jobs", Job.objects.filter(job_id=f"confirm-{lost}").count(), 0
    yield "rolled-back order: messages", OutboxMessage.objects.filter(body__order=lost).count(), 0

    of_message = {"message_id": story["message_id"]}
    yield (
        "message delivered twice: inbox rows",
        InboxMessage.objects.filter(**of_message).count(),
        1,
    )
    payments = Payment.objects.filter(**of_message)
    yield "message delivered twice: payments", payments.count(), 1
    yield "message delivered twice: bookings", payments.aggregate(n=Sum("bookings"))["n"], 1

    outbox = OutboxMessage.objects.filter(body__order__in=[str(r) for r in references])
    ids = set(outbox.values_list("message_id", flat=True))
    sent = set(SentMessage.objects.filter(message_id__in=ids).values_list("message_id", flat=True))
    yield "messages in the outbox", len(ids), len(references) + 1
    yield "messages sent", len(sent), len(ids)
    yield "messages still waiting", OutboxMessage.objects.filter(sent_at=None).count(), 0

    rows = story["import"]["rows"]
    chunks = ImportedChunk.objects.filter(job_id=story["import"]["job"].job_id)
    yield "rows imported, chunk by chunk", chunks.aggregate(n=Sum("rows"))["n"], rows
    yield "airports in the table", Airport.objects.count(), rows
    failing = next(job for job in jobs if job.handler == flaky.name)
    yield "attempts of the job that fails twice", failing.attempt_count, 3


def expect(condition, sentence):
    if not condition:
        raise UnexpectedError(sentence)
