// Computes the normal distribution in logs, for the tilted-moment estimator (docs/mathematics.md).
// float64.
#pragma once

namespace prefixd {

// erfcx(x) = exp(x^2) erfc(x); relative error below 1e-14 for x >= -5. Infinite below about -26.6.
double Erfcx(double x);
// log Phi(t), Phi the standard normal distribution function; finite for every finite t >= -1e150.
double LogNormalCdf(double t);
// h(t) = pdf(t) / Phi(t), the inverse Mills ratio; ~ -t for very negative t.
double NormalHazard(double t);
// sigma^2/2 + mu + log Phi((c - mu - sigma^2)/sigma): the log mean of exp(s) for s ~ N(mu, sigma^2)
// restricted to s <= c (without the restriction's own normalisation, as in docs/mathematics.md).
// sigma > 0; c may be +inf (no cut).
double LogTiltedMass(double mu, double sigma, double c);

}  // namespace prefixd
