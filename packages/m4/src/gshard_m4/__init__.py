"""m4: massively multilingual translation into English with the GShard MoE Transformer."""
