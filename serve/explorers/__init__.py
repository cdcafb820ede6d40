"""External explorers that ship as examples: programs that edit source files and measure them."""
