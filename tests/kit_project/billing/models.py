from django.db import models


class Account(models.Model):
    owner = models.CharField(max_length=100, unique=True)
    cents = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.owner


class Bonus(models.Model):
    account = models.ForeignKey(Account, on_delete=models.CASCADE)
    month = models.CharField(max_length=7)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "month"], name="one_bonus_a_month")
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.month}"


class Invoice(models.Model):
    number = models.CharField(max_length=20, unique=True)
    cents = models.IntegerField()
    receipt = models.CharField(max_length=50, blank=True)
    state = models.CharField(max_length=20, default="open")

    def __str__(self) -> str:
        return self.number
