"""How policy weights travel: one flat buffer, its layout, and the transports that move it between processes."""
