"""The oracle against real training steps on this machine: strategies × networks × ranks.

python -m benchmarks.oracle_runs measure FOLDER    calibrate, run the steps, keep both and the pace of each case
python -m benchmarks.oracle_runs predict FOLDER    predict the steps, as calibrated and at that pace; print every point
"""
