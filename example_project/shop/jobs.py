"""The shop's jobs. `django_durable_jobs` finds this module by its name.

A job runs *at least once*: a worker can be killed at any moment, and then the
job runs again. What makes an effect happen *exactly once* is where it is written:

- in the job's own database: inside one `transaction.atomic()` with
  `ctx.complete()` (the whole job) or `ctx.checkpoint()` (one step of it);
- anywhere else (`relay_outbox`): at least once, with an id by which the other
  side can recognise a repetition.
"""

import time
from dataclasses import dataclass

from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django_durable_jobs import ModelId, PermanentError, job

from shop import airports, broker
from shop.models import Account, Airport, ImportedChunk, Order, OutboxMessage, Payment


@dataclass
class ConfirmOrder:
    order: ModelId[Order]


@job("shop.confirm_order")
def confirm_order(ctx, payload: ConfirmOrder):
    """Confirm an order. The confirmation and the job's end commit together."""
    with transaction.atomic():
        Order.objects.filter(pk=payload.order.pk).update(
            confirmed_at=timezone.now(), confirmations=F("confirmations") + 1
        )
        ctx.complete()


@dataclass
class BookPayment:
    payment: ModelId[Payment]


@job("shop.book_payment")
def book_payment(ctx, payload: BookPayment):
    """Book a payment that was received, in the same way."""
    with transaction.atomic():
        payment = Payment.objects.select_related("order").get(pk=payload.payment.pk)
        payment.bookings = F("bookings") + 1
        payment.booked_at = timezone.now()
        payment.save(update_fields=["bookings", "booked_at"])
        Order.objects.filter(pk=payment.order_id, paid_at=None).update(paid_at=payment.booked_at)
        ctx.complete()


@dataclass
class Deposit:
    account: ModelId[Account]
    cents: int


@job("shop.deposit")
def deposit(ctx, payload: Deposit):
    """Add to an account what was paid in: money that must not come twice, nor get lost."""
    with transaction.atomic():
        found = Account.objects.filter(pk=payload.account.pk).update(
            balance_cents=F("balance_cents") + payload.cents
        )
        if not found:
            raise PermanentError("The account is gone.")
        ctx.complete({"cents": payload.cents})


@dataclass
class RelayMessage:
    message: ModelId[OutboxMessage]


@job("shop.relay_outbox", backoff=[1, 5, 30], max_attempts=20)
def relay_outbox(ctx, payload: RelayMessage):
    """Send one message of the outbox: at least once.

    A crash between the two lines at the end sends the message again. No order of the two
    avoids it (the other one would lose the message), so the receiver drops repetitions by
    `message_id`, as our own inbox does (services.py).
    """
    message = OutboxMessage.objects.get(pk=payload.message.pk)
    if message.sent_at is None:
        broker.publish(message)
        OutboxMessage.objects.filter(pk=message.pk).update(sent_at=timezone.now())


@dataclass
class ImportAirports:
    source: str = ""  # "" is the packaged list, else a name under SHOP_IMPORT_DIR
    chunk_rows: int = 500
    pause_seconds: float = 0.0  # after each chunk, so that you can watch or kill it


@job("shop.import_airports", max_attempts=5, backoff=2)
def import_airports(ctx, payload: ImportAirports):
    """Import a file in chunks; go on after the last one that was committed."""
    try:
        return import_file(ctx, payload, airports.find_file(payload.source))
    except airports.BadFileError as error:
        raise PermanentError(str(error)) from error


def import_file(ctx, payload, path):
    digest, total = airports.digest(path), airports.count_rows(path)
    done = ctx.checkpoint_value or {"digest": digest, "rows": 0}
    if done["digest"] != digest:
        raise PermanentError("The file changed while it was being imported.")
    for first_row, chunk in airports.read_chunks(path, done["rows"], payload.chunk_rows):
        ctx.check()  # asked to stop? Then between two chunks, not inside one
        done["rows"] = first_row + len(chunk)
        with transaction.atomic():
            write_chunk(ctx, first_row, chunk)
            ctx.checkpoint(done)
            ctx.progress(done["rows"] / total, f"{done['rows']:,} of {total:,} rows")
        time.sleep(payload.pause_seconds)
    return {"rows": done["rows"]}


def write_chunk(ctx, first_row, chunk):
    """Insert or update a chunk's airports by code, and keep who did it."""
    Airport.objects.bulk_create(
        {airport.code: airport for airport in chunk}.values(),
        update_conflicts=True,
        unique_fields=["code"],
        update_fields=["iata", "name", "city", "country", "latitude", "longitude"],
    )
    ImportedChunk.objects.create(
        job_id=ctx.job_id, first_row=first_row, rows=len(chunk), attempt=ctx.attempt
    )


@job("shop.flaky", max_attempts=4, backoff=[0.2, 0.5, 1])
def flaky(ctx):
    """Fail twice, then succeed: what a supplier's bad minute looks like."""
    if ctx.attempt < 3:
        raise ConnectionError("The supplier does not answer.")
    return {"answered": True}
