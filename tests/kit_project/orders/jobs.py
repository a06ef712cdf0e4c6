from dataclasses import dataclass

from django.core.mail import send_mail
from django.db import transaction
from django.db.models import F

from django_durable_jobs import JobContext, ModelId, job, schedule

from .models import Account, Order, Product


@dataclass
class Confirm:
    reference: str


@dataclass
class Deposit:
    account: ModelId[Account]
    cents: int


@dataclass
class Catalogue:
    names: list[str]


@job("orders.confirm", queue="mails", max_attempts=3, backoff=[60, 300])
def confirm(ctx: JobContext, payload: Confirm) -> None:
    order = Order.objects.get(reference=payload.reference)
    send_mail("Confirmed", f"Order {order} is confirmed.", None, [order.email])
    Order.objects.filter(pk=order.pk).update(confirmed=True)


@job("orders.remind")
async def remind(ctx: JobContext, payload: Confirm) -> bool:
    order = await Order.objects.aget(reference=payload.reference)
    await ctx.aprogress(0.5, "found")
    return order.confirmed


@job("orders.remind_all")
def remind_all(ctx: JobContext) -> None:
    for order in Order.objects.filter(confirmed=False):
        send_mail("Reminder", f"Order {order} waits.", None, [order.email])


schedule("reminders", "30 9 * * mon-fri", remind_all, timezone="Europe/Paris")


@job("orders.deposit")
def deposit(ctx: JobContext, payload: Deposit) -> None:
    """Exactly once: the account and the job's end commit together."""
    with transaction.atomic():
        ctx.fence()
        Account.objects.filter(pk=payload.account.pk).update(cents=F("cents") + payload.cents)
        ctx.complete({"cents": payload.cents})


@job("orders.deposit_carelessly")
def deposit_carelessly(ctx: JobContext, payload: Deposit) -> None:
    Account.objects.filter(pk=payload.account.pk).update(cents=F("cents") + payload.cents)


@job("orders.import", timeout=600)
def import_catalogue(ctx: JobContext, payload: Catalogue) -> int:
    """Go on after the last product of the attempt before."""
    done = ctx.checkpoint_value or 0
    for number, name in enumerate(payload.names[done:], start=done + 1):
        ctx.check()
        with transaction.atomic():
            Product.objects.create(name=name)
            ctx.checkpoint(number)
        ctx.progress(number / len(payload.names))
    return len(payload.names)
