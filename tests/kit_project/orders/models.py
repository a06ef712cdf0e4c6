from django.db import models


class Order(models.Model):
    reference = models.CharField(max_length=20, unique=True)
    email = models.EmailField()
    confirmed = models.BooleanField(default=False)

    def __str__(self) -> str:
        return self.reference


class Account(models.Model):
    owner = models.CharField(max_length=100, unique=True)
    cents = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.owner


class Product(models.Model):
    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name
