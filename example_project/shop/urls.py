from django.urls import path

from shop import views, webhooks

app_name = "shop"
urlpatterns = [
    path("", views.place_order, name="place_order"),
    path("orders/", views.orders, name="orders"),
    path("imports/", views.imports, name="imports"),
    path("imports/<int:pk>/", views.import_detail, name="import"),
    path("imports/<int:pk>/status/", views.import_status, name="import_status"),
    path("imports/<int:pk>/cancel/", views.cancel_import, name="cancel_import"),
    path("jobs/", views.jobs, name="jobs"),
    path("webhooks/payments/", webhooks.payment_received, name="payment_received"),
]
