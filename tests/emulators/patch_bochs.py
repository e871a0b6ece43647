"""Mend what keeps Bochs 3.0 from running lowprec on its Sapphire Rapids: ``patch_bochs.py SOURCE-FOLDER``.

- Linux lets a process use tiles only where XFD (Extended Feature Disable, Intel SDM volume 1, section 13.14) tells the
  kernel of their first use by ``#NM``. Bochs has tiles without it.
- ``IA32_MISC_ENABLE`` reads as 0, from which Linux concludes that string instructions are slow, beside a CPUID bit that
  says that they are fast; its ``memmove`` has no code for both.
- ``TDPBSSD`` multiplies signed bytes as if they were unsigned.
- ``VCVTNE2PS2BF16`` reads one of its sources beyond its end, and converts whatever lies there.
"""

import sys
from pathlib import Path

#: File, a line of it, and what is put in its place.
EDITS = (
    (
        "cpu/cpu.h",
        "  Bit64u ia32_xss;\n",
        """\
  Bit64u ia32_xss;
  Bit64u ia32_xfd;
  Bit64u ia32_xfd_err;
""",
    ),
    (
        "cpu/init.cc",
        "  BX_CPU_THIS_PTR msr.ia32_xss = 0;\n",
        """\
  BX_CPU_THIS_PTR msr.ia32_xss = 0;
  BX_CPU_THIS_PTR msr.ia32_xfd = 0;
  BX_CPU_THIS_PTR msr.ia32_xfd_err = 0;
""",
    ),
    (
        "cpu/cpuid.cc",
        """\
      leaf->eax |= (1<<3);

    // EBX""",
        """\
      leaf->eax |= (1<<3);
    if (is_cpu_extension_supported(BX_ISA_AMX))
      leaf->eax |= (1<<4);

    // EBX""",
    ),
    (
        "cpu/cpuid.cc",
        "      leaf->ecx = (cpu->ia32_xss_suppmask & (1 << subfunction)) != 0;\n",
        """\
      leaf->ecx = (cpu->ia32_xss_suppmask & (1 << subfunction)) != 0;
      if (subfunction == xcr0_t::BX_XCR0_XTILEDATA_BIT) leaf->ecx |= (1<<2);
""",
    ),
    (
        "cpu/msr.cc",
        "  msr_desc[BX_MSR_XSS] =",
        """\
  msr_desc[0x1a0] = new MSR_Descriptor("MSR_IA32_MISC_ENABLE", BX_ISA_386);
  msr_desc[BX_MSR_IA32_XFD] = new MSR_Descriptor("MSR_IA32_XFD", BX_ISA_AMX);
  msr_desc[BX_MSR_IA32_XFD_ERROR] = new MSR_Descriptor("MSR_IA32_XFD_ERR", BX_ISA_AMX);
  msr_desc[BX_MSR_XSS] =""",
    ),
    (
        "cpu/msr.cc",
        """\
    case BX_MSR_XSS:
      if (! is""",
        """\
    case 0x1a0: // fast strings
      val64 = 1;
      break;
    case BX_MSR_IA32_XFD:
      val64 = BX_CPU_THIS_PTR msr.ia32_xfd;
      break;
    case BX_MSR_IA32_XFD_ERROR:
      val64 = BX_CPU_THIS_PTR msr.ia32_xfd_err;
      break;
    case BX_MSR_XSS:
      if (! is""",
    ),
    (
        "cpu/msr.cc",
        """\
    case BX_MSR_XSS:
      {
""",
        """\
    case 0x1a0:
      break;
    case BX_MSR_IA32_XFD:
      if (val_64 & ~Bit64u(BX_XCR0_XTILEDATA_MASK)) return false;
      BX_CPU_THIS_PTR msr.ia32_xfd = val_64;
      handleAvxModeChange();
      break;
    case BX_MSR_IA32_XFD_ERROR:
      if (val_64 & ~Bit64u(BX_XCR0_XTILEDATA_MASK)) return false;
      BX_CPU_THIS_PTR msr.ia32_xfd_err = val_64;
      break;
    case BX_MSR_XSS:
      {
""",
    ),
    (
        "cpu/proc_ctrl.cc",
        """\
XTILEDATA_MASK)) != 0)
    clear_amx_ok();""",
        """\
XTILEDATA_MASK)) != 0 ||
      (BX_CPU_THIS_PTR msr.ia32_xfd & BX_XCR0_XTILEDATA_MASK) != 0)
    clear_amx_ok();""",
    ),
    (
        "cpu/proc_ctrl.cc",
        """\
(BX_XCR0_XTILECFG_MASK | BX_XCR0_XTILEDATA_MASK))
    exception(BX_UD_EXCEPTION, 0);
""",
        """\
(BX_XCR0_XTILECFG_MASK | BX_XCR0_XTILEDATA_MASK))
    exception(BX_UD_EXCEPTION, 0);

  if (BX_CPU_THIS_PTR msr.ia32_xfd & BX_XCR0_XTILEDATA_MASK) {
    BX_CPU_THIS_PTR msr.ia32_xfd_err = BX_XCR0_XTILEDATA_MASK;
    exception(BX_NM_EXCEPTION, 0);
  }
""",
    ),
    (
        "cpu/avx/amx.cc",
        "BX_CPP_INLINE Bit32u DPBDSS(Bit32u x, Bit32u y)\n{\n",
        """\
BX_CPP_INLINE Bit32u DPBDSS(Bit32u x, Bit32u y)
{
  Bit32s sum = 0;
  for (unsigned n = 0; n < 32; n += 8)
    sum += Bit32s(Bit8s(x >> n)) * Bit32s(Bit8s(y >> n));
  return sum;
}

BX_CPP_INLINE Bit32u DPBDSS_of_3_0(Bit32u x, Bit32u y)
{
""",
    ),
    (
        "cpu/avx/avx512_bf16.cc",
        "convert_ne_fp32_to_bfloat16(op1.vmm32u(n));",
        "convert_ne_fp32_to_bfloat16(op1.vmm32u(n - DWORD_ELEMENTS(len)));",
    ),
)


def main(source):
    texts = {}
    for name, old, new in EDITS:
        path = source / name
        text = texts.setdefault(path, path.read_text(encoding="latin-1"))
        if text.count(old) != 1:
            raise SystemExit(f"{name}: found {text.count(old)} times, wanted once: {old!r}")
        texts[path] = text.replace(old, new)
    for path, text in texts.items():
        path.write_text(text, encoding="latin-1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
