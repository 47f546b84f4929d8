"""The one place that joins planner, schedule, weight policy and simulator.

``mode="sync"`` trains with a flush after every batch and minimises the step; ``mode="async"`` never
flushes and minimises the time from one mini-batch to the next.
"""

from anabranch.solve.asynchronous.simulation import Simulated as Simulated
from anabranch.solve.asynchronous.simulation import require_asynchronous as require_asynchronous
from anabranch.solve.asynchronous.simulation import simulate_async as simulate_async
from anabranch.solve.comparison import baselines as baselines
from anabranch.solve.comparison import comparable as comparable
from anabranch.solve.comparison import compare as compare
from anabranch.solve.comparison import compare_policies as compare_policies
from anabranch.solve.explanation.explanation import Explanation as Explanation
from anabranch.solve.explanation.explanation import explain as explain
from anabranch.solve.faults import check_plan as check_plan
from anabranch.solve.planner_options import options_of as options_of
from anabranch.solve.policy_choice import auto_policy as auto_policy
from anabranch.solve.policy_choice import check_mode as check_mode
from anabranch.solve.rewriting import TriedRewrites as TriedRewrites
from anabranch.solve.rewriting import plan_with_rewrites as plan_with_rewrites
from anabranch.solve.schedule_choice import AUTO as AUTO
from anabranch.solve.search import plan as plan
from anabranch.solve.simulation import foreseen as foreseen
from anabranch.solve.simulation import ideal_step_s as ideal_step_s
from anabranch.solve.simulation import simulate as simulate
from anabranch.solve.simulation import synchronous as synchronous
