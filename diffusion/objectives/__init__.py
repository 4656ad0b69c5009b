"""What a network is trained to predict, from what, and how images are sampled from it: functions of tensors."""
