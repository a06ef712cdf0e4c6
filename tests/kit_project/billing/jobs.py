from dataclasses import dataclass

from django.core.mail import send_mail
from django.db import transaction
from django.db.models import F

from django_durable_jobs import FinishEvent, JobContext, ModelId, PermanentError, job

from . import gateway
from .models import Account, Bonus, Invoice


@dataclass
class Transfer:
    source: ModelId[Account]
    target: ModelId[Account]
    cents: int


@job("billing.transfer")
def transfer(ctx: JobContext, payload: Transfer) -> None:
    with transaction.atomic():
        ctx.fence()  # an attempt that lost its job stops here, before any work
        funded = Account.objects.filter(pk=payload.source.pk, cents__gte=payload.cents)
        if not funded.update(cents=F("cents") - payload.cents):
            raise PermanentError("Not enough money.")
        Account.objects.filter(pk=payload.target.pk).update(cents=F("cents") + payload.cents)
        tell.stage(payload.target)
        ctx.complete({"cents": payload.cents})  # last: the job has ended


@job("billing.tell")
def tell(ctx: JobContext, payload: ModelId[Account]) -> None:
    account = payload.get()
    send_mail("Paid in", f"You have {account.cents} cents.", None, [f"{account}@example.com"])


def settle(event: FinishEvent) -> None:
    """Write down how it ended, whatever the end."""
    state = "paid" if event.status == "succeeded" else "unpaid"
    Invoice.objects.filter(number=event.job_id).update(state=state)


@job("billing.charge", max_attempts=5, on_finish=settle)
def charge(ctx: JobContext, payload: ModelId[Invoice]) -> str:
    invoice = payload.get()
    # The same in each attempt, unlike ctx.token: a second call finds the first one's charge.
    receipt = gateway.charge(invoice.cents, key=f"{ctx.scope}/{ctx.job_id}")
    Invoice.objects.filter(pk=invoice.pk).update(receipt=receipt)  # sets, and adds nothing
    return receipt


@dataclass
class MonthlyBonus:
    account: ModelId[Account]
    month: str


@job("billing.bonus")
def bonus(ctx: JobContext, payload: MonthlyBonus) -> bool:
    with transaction.atomic():
        _, is_new = Bonus.objects.get_or_create(account_id=payload.account.pk, month=payload.month)
        if is_new:
            Account.objects.filter(pk=payload.account.pk).update(cents=F("cents") + 500)
    return is_new


@job("billing.warn", max_attempts=1, retry_on_interrupt=False)
def warn(ctx: JobContext, payload: ModelId[Account]) -> None:
    """At most once: rather no mail than two."""
    send_mail("In debt", "Please pay.", None, [f"{payload.get()}@example.com"])
