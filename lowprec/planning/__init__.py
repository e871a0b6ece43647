"""From shapes, strides, element types and a mode to a printable plan, without reading an array or a device."""

from lowprec.planning.activations import ACTIVATIONS, parse_activation
from lowprec.planning.bounds import ErrorBound, error_bound
from lowprec.planning.kernels import Capabilities, KernelRow
from lowprec.planning.layout import GemmLayout, MatrixStack, OperandSpec, gemm_layout
from lowprec.planning.plan import Copy, GemmPlan
from lowprec.planning.plan_report import PlanReport
from lowprec.planning.planner import plan_gemm
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.schedule import PartProduct
from lowprec.planning.selection import Candidate, check_bound, check_rtol, select_mode
