"""One node of a job, as `launch/node.sh` runs it: the doctor, Ray, the trainer ranks, and the end of all of them."""
