"""Our own kernels for x86 processors, made at run time by LLVM (llvmlite); no compiler is needed where it runs."""
