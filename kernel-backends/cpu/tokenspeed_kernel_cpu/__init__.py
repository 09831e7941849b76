"""Native CPU kernels: one C++ module, compiled for several instruction sets, behind tokenspeed_kernel's registry."""

from tokenspeed_kernel_cpu.instruction_sets import available_instruction_sets, instruction_set, use_instruction_set
from tokenspeed_kernel_cpu.registration import register
from tokenspeed_kernel_cpu.threads import num_threads, set_num_threads

__all__ = [
    "available_instruction_sets",
    "instruction_set",
    "num_threads",
    "register",
    "set_num_threads",
    "use_instruction_set",
]
