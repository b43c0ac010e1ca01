"""Hooks that several verbs share: they observe a model while it runs, without editing it."""

from wellposed.hooks._attention import AttentionCall as AttentionCall
from wellposed.hooks._attention import AttentionWatcher as AttentionWatcher
from wellposed.hooks._attention import MultiheadCall as MultiheadCall
from wellposed.hooks._attention import ObservingHook as ObservingHook
from wellposed.hooks._attention import ScaledDotProductCall as ScaledDotProductCall
from wellposed.hooks._attention import SoftmaxCall as SoftmaxCall
from wellposed.hooks._attention import largest_logits as largest_logits
from wellposed.hooks._attention import observing_paused as observing_paused
from wellposed.hooks._calls import hooks_in_call as hooks_in_call
from wellposed.hooks._calls import replaced_method as replaced_method
from wellposed.hooks._calls import without_backward_hooks as without_backward_hooks
from wellposed.hooks._lifetime import WhileAlive as WhileAlive
from wellposed.hooks._lifetime import end_with as end_with
from wellposed.hooks._options import changing_hooks as changing_hooks
from wellposed.hooks._options import content_digest as content_digest
from wellposed.hooks._options import mode_matters as mode_matters
from wellposed.hooks._options import module_options as module_options
from wellposed.hooks._run import call_model as call_model
from wellposed.hooks._run import copied as copied
from wellposed.hooks._run import evaluating as evaluating
from wellposed.hooks._run import first_tensor as first_tensor
from wellposed.hooks._run import own_batch as own_batch
from wellposed.hooks._run import quiet_run as quiet_run
from wellposed.hooks._run import real_tokens as real_tokens
from wellposed.hooks._run import same_draws as same_draws
from wellposed.hooks._run import unmerges_when_called as unmerges_when_called
