"""Adapters of PEFT: their files hold nothing of the model below."""

from peft.peft_model import PeftModel

from wellposed.integrations._saved_attention import say_lost_attention

say_lost_attention(PeftModel)
