"""The main job on one machine: data, tokenizer, training, a resume, and text, through the real launcher."""
