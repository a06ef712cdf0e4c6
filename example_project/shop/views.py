"""The pages. None of them does the work: they stage a job and show its row.

To keep the example short anyone may use them. In a real shop the pages about
imports and jobs stand behind a login and a permission.
"""

from django.contrib import messages
from django.db.models import Sum
from django.http import JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST
from django_durable_jobs.models import Job

from shop import services
from shop.forms import ImportForm, OrderForm
from shop.jobs import flaky, import_airports
from shop.models import Airport, ImportedChunk, Order

STATUS_TEXT = {
    "scheduled": "Waiting for its time",
    "queued": "Waiting for a worker",
    "running": "Running",
    "blocked": "Blocked: no worker can run it",
    "succeeded": "Done",
    "failed": "Failed",
    "cancelled": "Cancelled",
    "interrupted": "Interrupted",
}


def place_order(request):
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        order = services.place_order(**form.cleaned_data)
        messages.success(request, f"{order} is placed. We confirm it in a moment.")
        return redirect("shop:orders")
    return render(request, "shop/place_order.html", {"form": form})


@never_cache
@require_GET
def orders(request):
    latest = Order.objects.select_related("product")[:50]
    return render(request, "shop/orders.html", {"orders": latest})


@never_cache
def imports(request):
    form = ImportForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        job = services.start_import(
            source=form.cleaned_data["source"],
            pause_seconds=float(form.cleaned_data["speed"]),
        )
        if not job.newly_created:
            messages.info(request, "An import is under way already: this one.")
        return redirect("shop:import", pk=job.pk)
    latest = Job.objects.filter(handler=import_airports.name).order_by("-pk")[:10]
    return render(
        request,
        "shop/imports.html",
        {
            "form": form,
            "imports": [(job, describe(job)) for job in latest],
            "airports": Airport.objects.count(),
        },
    )


@never_cache
@require_GET
def import_detail(request, pk):
    job = find_import(pk)
    return render(
        request,
        "shop/import.html",
        {"job": job, "status": describe(job), "attempts": job.attempts.order_by("number")},
    )


@never_cache
@require_GET
def import_status(request, pk):
    return JsonResponse(describe(find_import(pk)))


@require_POST
def cancel_import(request, pk):
    answer = find_import(pk).request_cancel()
    text = {
        "cancelled": "The import is cancelled; it had not begun.",
        "requested": "The import stops after the rows it is writing now.",
        "unchanged": "The import had already ended.",
    }
    messages.info(request, text[answer])
    return redirect("shop:import", pk=pk)


@never_cache
def jobs(request):
    if request.method == "POST":
        flaky.enqueue()
        messages.success(request, "The flaky job is queued: reload to see its attempts.")
        return redirect("shop:jobs")
    latest = Job.objects.order_by("-pk")[:25]
    return render(request, "shop/jobs.html", {"jobs": [(job, describe(job)) for job in latest]})


def find_import(pk):
    return get_object_or_404(Job, pk=pk, handler=import_airports.name)


def describe(job):
    """Say how a job stands, in JSON types: for the page and for its script."""
    text = STATUS_TEXT[job.status]
    if job.cancel_requested_at and not job.is_terminal:
        text = "Stopping"
    elif job.status == "scheduled" and job.attempt_count:
        text = "Waiting to try again"
    chunks = ImportedChunk.objects.filter(job_id=job.job_id)
    return {
        "status": job.status,
        "text": text,
        "percent": int(100 * job.progress),
        "message": job.progress_message or "none yet",
        "rows": chunks.aggregate(rows=Sum("rows"))["rows"] or 0,
        "attempts": job.attempt_count,
        "finished": job.is_terminal,
        "can_cancel": not (job.is_terminal or job.cancel_requested_at),
        "error": job.error_summary or "none",
    }
