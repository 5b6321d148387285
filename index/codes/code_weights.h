// The arithmetic that makes small whole numbers of queries, for key_codes.cc and for the kernels of
// gpu/, which so agree to the bit: every product here is exact in float64, or rounded once before
// anything else is done with it, and nothing depends on whether a compiler fuses it with a sum.
//
// Thread-safety: pure functions.
#pragma once

#include <math.h>

#include <cstdint>

#include "prefixd/host_device.h"

namespace prefixd {

// Of a component with digits (base 4): its weight's size in its highest digit, and how far its
// codes reach. along: its share of the score, of step 1.
PREFIXD_HD inline double HighestWeight(float along, uint32_t digits) {
  return digits == 0 ? 0 : fabs(double{along}) * double(1u << 2 * (digits - 1));
}
PREFIXD_HD inline double ReachOfCodes(float along, uint32_t digits) {
  return fabs(double{along}) * double((1u << 2 * digits) - 1);  // 3 (1 + 4 + 16 + ...)
}

// What one whole number stands for, so that weights are at most 127 and sums of them with digits,
// once half of the digits' range is taken away, stay below 2^15 (rounding adds at most half to each
// weight).
//   largest: of HighestWeight; total: sum of ReachOfCodes, and twice what else is to be added
PREFIXD_HD inline double CodeUnit(double largest, double total, uint32_t fields) {
  const double room = 32767 - 1 - 0.75 * fields;
  const double by_weight = largest / 127, by_sum = total / 2 / room;
  const double unit = by_weight > by_sum ? by_weight : by_sum;
  return unit > 0 && unit <= 1.7976931348623157e308 ? unit : 1;
}

// The weight of a component's digit `digit`, 0 being the lowest. sign: of the scale, 1 or -1.
PREFIXD_HD inline int32_t CodeWeight(float along, uint32_t digit, double sign, double unit) {
  const double weight = rint(sign * double{along} * double(1u << 2 * digit) / unit);
  return weight >= 127 ? 127 : weight > -127 ? static_cast<int32_t>(weight) : -127;
}

// What the bias of a sum of weights with digits takes away: the middle of its range.
PREFIXD_HD inline int32_t MiddleOfCodes(int32_t sum_of_weights) { return 3 * sum_of_weights / 2; }

// How far a weighted sum less its middle can lie from zero, at most, by one weight.
PREFIXD_HD inline int32_t ReachOfWeight(int32_t weight) {
  return (3 * (weight < 0 ? -weight : weight) + 1) / 2;
}

// A mean's integer score in units of its block's keys: as CodeScanTable::scaled.
PREFIXD_HD inline int32_t InUnitsOfKeys(float units_of_mean, int32_t mean) {
  return static_cast<int32_t>(rintf(units_of_mean * static_cast<float>(mean)));
}

}  // namespace prefixd
