from django import forms

from shop import airports
from shop.models import Order

SPEEDS = {
    "0.0": "As fast as it can",
    "0.1": "Slowly (about 10 seconds)",
    "0.5": "Very slowly (about 30 seconds)",
}


class OrderForm(forms.ModelForm):
    quantity = forms.IntegerField(min_value=1, max_value=100, initial=1)

    class Meta:
        model = Order
        fields = ["customer", "product", "quantity"]
        labels = {"customer": "Your name"}
        widgets = {"customer": forms.TextInput(attrs={"autocomplete": "name"})}


class ImportForm(forms.Form):
    source = forms.CharField(
        label="File",
        required=False,
        max_length=200,
        help_text="A CSV file in the import folder. Empty: the packaged airport list.",
    )
    speed = forms.ChoiceField(choices=list(SPEEDS.items()), initial="0.1")

    def clean_source(self):
        try:
            airports.find_file(self.cleaned_data["source"])
        except airports.BadFileError as error:
            raise forms.ValidationError(str(error)) from None
        return self.cleaned_data["source"]
