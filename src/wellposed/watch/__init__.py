"""Hooks that several verbs share: they observe a model while it runs, without editing it."""

from wellposed.watch._attention import AttentionCall as AttentionCall
from wellposed.watch._attention import AttentionWatcher as AttentionWatcher
from wellposed.watch._attention import MultiheadCall as MultiheadCall
from wellposed.watch._attention import ObservingHook as ObservingHook
from wellposed.watch._attention import ScaledDotProductCall as ScaledDotProductCall
from wellposed.watch._attention import SoftmaxCall as SoftmaxCall
from wellposed.watch._attention import largest_logits as largest_logits
from wellposed.watch._attention import observing_paused as observing_paused
from wellposed.watch._run import call_model as call_model
from wellposed.watch._run import copied as copied
from wellposed.watch._run import evaluating as evaluating
from wellposed.watch._run import first_tensor as first_tensor
from wellposed.watch._run import own_batch as own_batch
from wellposed.watch._run import quiet_run as quiet_run
from wellposed.watch._run import real_tokens as real_tokens
from wellposed.watch._run import same_draws as same_draws
from wellposed.watch._run import unmerges_when_called as unmerges_when_called
